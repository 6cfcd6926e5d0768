"""Health, episode statistics, plots, the doctor and the memory plan."""
