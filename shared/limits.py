"""Bounds of the public contract on a request that gateway and worker check alike.

The gateway refuses first, in its client's words; the worker relies on no gateway.
"""

MAX_REQUEST_ID_BYTES = 128
MAX_COMPLETIONS = 8
# Of one Abort call.
MAX_ABORTED_IDS = 1024
# Either way from 0, frequency and presence alike.
MAX_PENALTY = 2.0
MAX_LOGIT_BIASES = 1024
# Either way from 0.
MAX_LOGIT_BIAS = 100.0
# Likeliest tokens told with each token.
MAX_LOGPROBS = 20
# Of a schema, an expression, a grammar, or all choices together.
MAX_STRUCTURE_BYTES = 64 << 10
MAX_CHOICES = 1024
