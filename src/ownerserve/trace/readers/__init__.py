"""One file a foreign format. A reader only translates: lines in, a Trace out, faults reported."""
