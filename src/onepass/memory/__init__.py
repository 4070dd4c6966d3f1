"""Episodic memories: real examples of the past, in a fixed amount of room."""

from onepass.memory.fleet import FleetMemory
from onepass.memory.protocol import EpisodicMemory
from onepass.memory.sampling import Policy

__all__ = ["EpisodicMemory", "FleetMemory", "Policy"]
