"""A worker of one's own in a few lines: it answers with the tokens it was sent.

Run: python examples/echo_worker.py MODEL_FOLDER (with ETCD_ENDPOINTS set).
"""

import sys

import worker_hooks


class Echo:
    async def generate(self, request, context):
        tokens = request["token_ids"][: request["stop_conditions"].get("max_tokens") or 16]
        for index, token in enumerate(tokens):
            yield {"token_ids": [token], "finish_reason": "length" if index == len(tokens) - 1 else None}


if __name__ == "__main__":
    worker_hooks.serve(Echo, model_path=sys.argv[1], model_name="echo")
