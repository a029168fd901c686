"""Decisions, without effects: what a snapshot must write, what a restore can take, what a store no longer needs."""
