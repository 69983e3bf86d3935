"""How the bundled model was made: data, training, export, evaluation.

Nothing in here is imported by the rest of the package. Start with `run.py`, which calls the phases
in order.
"""
