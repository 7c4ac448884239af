"""This package has one file for each foreign format. A reader only translates: lines in, a Trace
out, faults reported."""
