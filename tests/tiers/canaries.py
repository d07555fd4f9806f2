"""Tests that the fast tier always runs, whatever they cost: each shows from end to end that one feature
works.
"""

from __future__ import annotations

_E2E = "tests/e2e"
_QUANTIZED = f"{_E2E}/test_quantized_weights.py::test_the_same_tokens_however_it_is_served"
_SPECULATION = f"{_E2E}/test_speculation.py::test_answers_equal_those_without_speculation"
CANARIES = {
    "split over shm": f"{_E2E}/test_one_seed_one_answer.py::test_disaggregated[shm]",
    "split over tcp": f"{_E2E}/test_one_seed_one_answer.py::test_disaggregated[tcp]",
    "a worker killed": f"{_E2E}/test_failover.py::test_a_worker_is_killed[decode-0-as it decodes]",
    "seeds equal in a crowd": (
        f"{_E2E}/test_one_seed_one_answer.py::test_colocated_in_a_batch_and_after_a_prefix_hit"
    ),
    "a draft model": f"{_SPECULATION}[draft_model-disaggregated]",
    "EAGLE": f"{_SPECULATION}[eagle-disaggregated]",
    "a drain": f"{_E2E}/test_drain.py::test_running_requests_move_with_their_kv[shm]",
    "a grammar and a killed worker": (
        f"{_E2E}/test_structured_outputs.py::test_texts_are_valid_and_equal_on_all_deployments[killed]"
    ),
    "a grammar under drafts": (
        "tests/speculation/test_structured_text.py::test_texts_are_valid_and_equal_those_without_speculation[tree]"
    ),
    "an adapter": f"{_E2E}/test_lora.py::test_tokens_equal_those_of_merged_weights",
    "int8": f"{_QUANTIZED}[{{'quantization': 'int8'}}]",
    "a GGUF file": (
        "tests/checkpoints/test_real_models.py::test_greedy_tokens_are_transformers[bfloat16-smollm2]"
    ),
    "two routers": "tests/router/test_several_routers.py::test_routers_share_a_port_and_each_has_its_own",
    "the page in Chromium": f"{_E2E}/test_page.py::test_a_completion_streams_in_and_equals_the_api",
    "a server of Ray": "tests/deploy/test_serve.py::test_completions_take_the_disaggregated_path",
}
