"""`python -m echo_pg bench allreduce`: the all-reduce against what it replaces, checked and timed in one run.

cases (rows and sizes) · launch (ranks as processes) · collectives, two_collective (how each row adds up a tensor) ·
bound (what a correct result may be off by) · measure (check, then time) · results (numbers, table, JSON lines) · plot ·
allreduce (the command).
"""
