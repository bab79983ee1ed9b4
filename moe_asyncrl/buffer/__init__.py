"""The bounded queue between rollout and training, and the process that serves it."""
