"""Turns: what an agent asks its model, and the moments between one answer and the next question.

A proxy stands between agent and model. A request of the agent's main loop ends a turn: the sandbox is made safe while the
model thinks, and what would make the agent act is let through when that is done. What was asked and answered is
kept, so that an agent that comes back asks nobody twice. Knows nothing of how a sandbox is captured: who makes
it safe is given (`crab.turns.protection`).
"""
