"""The names of vLLM outside its public interface (`valor.rollout.vllm.internals`) are in the installed release."""

import inspect

import pytest

pytestmark = pytest.mark.vllm


def test_the_installed_release_has_them():
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from valor.rollout.vllm import internals

    parameters = inspect.signature(internals.layer_utils.dispatch_cpu_unquantized_gemm).parameters
    assert [*parameters] == ["layer", "remove_weight"]
    assert "cpu_linear" in inspect.getsource(internals.layer_utils)
    kernel = internals.CPUUnquantizedExperts
    assert [*inspect.signature(kernel.process_weights_after_loading).parameters] == ["self", "layer"]
    assert {"w1", "w2", "topk_weights", "topk_ids", "activation"} <= set(inspect.signature(kernel.apply).parameters)
    assert set(internals._PLAIN_EXPERTS) <= {backend.name for backend in UnquantizedMoeBackend}
    assert hasattr(internals.ExecutorWithExternalLauncher, "_distributed_args")
    assert hasattr(IncrementalDetokenizer, "num_output_tokens")
    assert {"detokenizer", "logprobs_processor"} <= set(inspect.signature(RequestState.__init__).parameters)
    assert "self.request_states" in inspect.getsource(OutputProcessor.__init__)
    assert "driver_worker" in inspect.getsource(internals.ExecutorWithExternalLauncher.__mro__[1])
    assert "model_executor" in inspect.getsource(LLMEngine.__init__)
    assert "self.requests" in inspect.getsource(GPUModelRunner.__init__)  # read by WeightReceiver
    assert {"cpu_group", "world_size"} <= set(inspect.get_annotations(internals.parallel_state.GroupCoordinator))
    assert [*inspect.signature(internals.process_dict_updates).parameters][:3] == [
        "req_entries",
        "batch_update",
        "new_state",
    ]
