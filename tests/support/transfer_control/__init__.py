"""What the tests of transfer's control are played with."""
