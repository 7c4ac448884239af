"""What requests say before any decision: identity, content, and the fields of their bodies."""
