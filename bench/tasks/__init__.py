"""Work of agents, written for measuring: trajectories (docs/replay.md), their recorded waits, and the image they run in."""
