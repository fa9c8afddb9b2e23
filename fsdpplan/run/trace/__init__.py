"""Traces: a predicted step beside a measured one."""
