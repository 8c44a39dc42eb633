"""Many blocks, many seeds, one answer: running a study, its statistics and its report."""
