"""The directory's contract, real servers, and worlds of faults with their mutations."""
