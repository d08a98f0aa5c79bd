"""How good a policy is on tasks that it never saw."""
