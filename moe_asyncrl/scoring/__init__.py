"""Rewards: built-in rules, and user functions in processes that can be killed."""
