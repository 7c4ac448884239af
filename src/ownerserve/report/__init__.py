"""Metrics to tables, plots and pages."""
