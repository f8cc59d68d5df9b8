"""Which algorithm for which situation: the field's decision table as data (`rules.py`), and what it comes to."""

from __future__ import annotations

from renma.advice.ranking import Advice, Candidate, Reason, advise
from renma.advice.rules import RULES, Rule
from renma.advice.situation import Situation

__all__ = ["RULES", "Advice", "Candidate", "Reason", "Rule", "Situation", "advise"]
