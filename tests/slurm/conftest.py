"""The cluster for the tests of this folder."""

from tests.slurm.fixture import slurm

__all__ = ["slurm"]
