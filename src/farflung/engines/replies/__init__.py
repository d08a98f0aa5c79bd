"""What other engines answer, as arrays: token ids, log-probabilities and supports, checked before anything uses them.

Pure functions from parsed JSON. They take nothing on trust that the reply itself can contradict, never read its text, and
never renormalise: a reply that is not a record of what was drawn raises Corrupt, with the row and value that shows it and,
where the engine was asked in the wrong way, the mend.
"""

from farflung.engines.replies.base import Reply, Span
from farflung.engines.replies.sglang import read_sglang
from farflung.engines.replies.vllm import read_vllm

__all__ = ["Reply", "Span", "read_sglang", "read_vllm"]
