"""The benches of `python -m echo_pg bench`; launch (ranks as processes), results (circumstances, tables) and progress
serve all.

allreduce: the all-reduce against what it replaces, checked and timed in one run.
    cases (rows and sizes) · collectives, two_collective (how each row adds up a tensor) · bound (what a correct result
    may be off by) · measure (check, then time) · plot · allreduce (the command) · floors (what is left to gain)
accuracy: what it does to the predictions of a language model.
    text, smollm2 (what is read, by what) · accuracy_rows (options) · scoring (perplexity, divergence, greedy tokens) ·
    growth (site by site) · accuracy_run (one rank) · accuracy_results, accuracy_plot · accuracy (the command)
tasks: what it does to the answers of a language model, asked by lm-evaluation-harness.
    tasks_list (what is asked) · tasks_harness (by whom; alone imports it) · tasks_rank (one rank) · tasks_report
    (comparisons, tables, plot) · tasks (the command)
train, theory: whole trainings; errors against the paper's bounds.
    split (a model over ranks) · train_rank, theory_rank (what a rank does) · train_report, theory_report (tables and
    plots from records) · train, theory (the commands)
ttft, step: what it is worth to a whole model, without and with other traffic on the links.
    end_to_end (both commands) · end_to_end_model (a model whose sums are exchanged between two calls) · load (copies in
    the background) · end_to_end_rank (what a rank does) · end_to_end_report (what follows from times, tables, plots)
hooks, recompute: what telling passes apart costs; what activation checkpointing changes.
    transformer (the small model of both, and the text and optimizer of train)
report: all of it on one page (page); the plots of README and docs/ (figures: figures_speed, figures_accuracy).
"""
