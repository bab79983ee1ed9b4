"""What travels: trajectories, groups, messages, errors and small protocols."""
