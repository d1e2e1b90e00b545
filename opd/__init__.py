"""On-policy distillation: the student writes, the teacher marks every token, the student moves towards the teacher."""

__version__ = "0.1.0"
