"""Turns that other workers compute or hold state for are given up, between real processes."""
