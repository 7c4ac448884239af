"""The suites are the evaluation: each claim of the seeds as an experiment, one small file each."""
