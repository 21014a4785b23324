"""Comparing the modes: one job under several modes and conditions, and a report of what each gains and costs."""
