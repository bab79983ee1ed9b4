"""A run as a Slurm job: what is asked of the cluster, how roles become steps, how a job begins and ends."""
