"""This package makes tables, plots and pages of metrics."""
