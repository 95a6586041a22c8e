"""Windows around a connector, driven as vLLM drives it; vLLM itself is not needed."""

from types import SimpleNamespace

import pytest

from ascend_attn_backends import transfer_listener
from ascend_vllm_plugin import ConnectorSettingError
from ascend_vllm_plugin.kv_transfer import (
    FOLDER_MODULE,
    TransferWindows,
    connector_reasons,
    open_windows,
)


class Connector:
    """Stands for one of vLLM's; notes what it is asked for."""

    def __init__(self, vllm_config, role, kv_cache_config):
        self.asked = []

    def register_kv_caches(self, kv_caches):
        self.asked.append("register")

    def bind_connector_metadata(self, metadata):
        self.asked.append("bind")

    def start_load_kv(self, forward_context, **kwargs):
        self.asked.append("load" if self.transfer_gate.is_open else "load in a window")

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self.asked.append(layer_name if self.transfer_gate.is_open else "save in a window")

    def wait_for_save(self):
        self.asked.append("saved")

    def shutdown(self):
        self.asked.append("shutdown")


class Windowed(TransferWindows, Connector):
    pass


class Impl:
    """An attention implementation whose calls may fail."""

    def __init__(self, error=None):
        self.error = error

    def forward(self, value):
        if self.error is not None:
            raise self.error
        return 2 * value


class Diary:
    def __init__(self):
        self.told = []

    def attention_started(self):
        self.told.append("started")

    def attention_ended(self):
        self.told.append("ended")

    def attention_failed(self, error):
        self.told.append(error)


class Step:
    """A worker with two layers and a connector, step by step as vLLM's runner goes."""

    def __init__(self, error=None):
        self.layers = {
            "first": SimpleNamespace(impl=Impl()),
            "second": SimpleNamespace(impl=Impl(error)),
            "experts": SimpleNamespace(),
        }
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=self.layers)
        )
        self.connector = Windowed(config, "worker", None)
        self.connector.register_kv_caches({})
        self.connector.asked.clear()

    def run(self, error_between=None):
        self.connector.bind_connector_metadata(None)
        self.connector.start_load_kv(None)
        try:
            for name in ("first", "second"):
                assert self.layers[name].impl.forward(3) == 6
                self.connector.save_kv_layer(name, None, None)
            if error_between is not None:
                raise error_between
        finally:
            self.connector.wait_for_save()


@pytest.fixture
def step():
    made = []

    def make(error=None):
        made.append(Step(error))
        return made[-1]

    yield make
    for one in made:
        one.connector.shutdown()


def test_layers_are_saved_after_the_step_and_outside_windows(step):
    worker, diary = step(), Diary()
    with transfer_listener(diary):
        worker.run()
    assert diary.told == ["started", "ended"] * 2
    assert worker.connector.asked == ["bind", "load", "first", "second", "saved"]


def test_a_failure_in_a_window_ends_it_and_nothing_of_the_step_is_saved(step, caplog):
    error = RuntimeError("no such kernel")
    worker, diary = step(error), Diary()
    caplog.set_level("WARNING", logger="vllm.ascend_vllm_plugin")
    with transfer_listener(diary), pytest.raises(RuntimeError, match="no such kernel"):
        worker.run()
    assert diary.told == ["started", "ended", "started", error]
    assert worker.connector.asked == ["bind", "load", "saved"]
    assert "1 saves of keys are dropped" in caplog.text
    assert worker.connector.transfer_gate.is_open


def test_a_failure_outside_attention_saves_nothing_either(step):
    worker = step()
    with pytest.raises(KeyError):
        worker.run(error_between=KeyError("experts"))
    assert worker.connector.asked == ["bind", "load", "saved"]


def test_the_step_after_a_failure_is_saved(step):
    worker = step(RuntimeError("once"))
    with pytest.raises(RuntimeError, match="once"):
        worker.run()
    worker.layers["second"].impl.error = None
    worker.connector.asked.clear()
    worker.run()
    assert worker.connector.asked == ["bind", "load", "first", "second", "saved"]


def test_a_failure_between_steps_is_no_matter_of_the_next(step):
    worker = step(RuntimeError("profiling"))
    with pytest.raises(RuntimeError, match="profiling"):
        worker.layers["second"].impl.forward(1)
    worker.layers["second"].impl.error = None
    worker.run()
    assert worker.connector.asked == ["bind", "load", "first", "second", "saved"]


def test_caches_that_are_registered_again_open_one_window_each(step):
    worker, diary = step(), Diary()
    worker.connector.register_kv_caches({})
    with transfer_listener(diary):
        worker.run()
    assert diary.told == ["started", "ended"] * 2


def test_a_connector_that_was_shut_down_hears_nothing(step):
    worker = step(RuntimeError("late"))
    worker.connector.shutdown()
    with pytest.raises(RuntimeError, match="late"):
        worker.layers["second"].impl.forward(1)
    assert worker.connector._failure is None


def test_implementations_that_open_their_own_window_are_left_alone():
    impl = Impl()
    impl.opens_transfer_window = True
    open_windows(impl)
    assert "forward" not in vars(impl)


def test_both_calls_of_latent_attention_are_windows():
    impl, diary = SimpleNamespace(forward_mqa=lambda: "mqa", forward_mha=lambda: "mha"), Diary()
    open_windows(impl)
    with transfer_listener(diary):
        assert (impl.forward_mqa(), impl.forward_mha()) == ("mqa", "mha")
    assert diary.told == ["started", "ended"] * 2


def engine(module_path, ranks=1, **extra):
    """The parts of a configuration that the rules for connectors read."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_module_path=module_path, kv_connector_extra_config=extra
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks, prefill_context_parallel_size=1
        ),
    )


def reasons(config, facts):
    asked = {name: name in facts.split() for name in ("latent", "sparse", "draft")}
    return list(connector_reasons(config, **asked))


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ("", []),
        ("latent", ["latent"]),
        ("latent sparse", ["latent", "sparse"]),
        ("draft", ["draft"]),
    ],
)
def test_layers_whose_keys_other_connectors_do_not_see_are_named(facts, words, tmp_path):
    found = reasons(engine("ascend_vllm_plugin.kv_transfer"), facts)
    assert len(found) == len(words)
    for word, reason in zip(words, found, strict=True):
        assert word in reason
        assert "only FolderConnector" in reason
    assert reasons(engine(FOLDER_MODULE, shared_storage_path=str(tmp_path)), facts) == []


def test_the_folder_connector_takes_no_part_of_a_prompt(tmp_path):
    (reason,) = reasons(engine(FOLDER_MODULE, 2, shared_storage_path=str(tmp_path)), "latent")
    assert "context parallelism" in reason


def test_wrong_settings_of_the_folder_connector_are_found_with_the_layers():
    with pytest.raises(ConnectorSettingError, match="shared_storage_path is None"):
        reasons(engine(FOLDER_MODULE), "latent")


def test_other_names_are_no_attributes():
    import ascend_vllm_plugin.kv_transfer as module

    for name in ("ExampleConnector", "Windowed"):
        with pytest.raises(AttributeError, match=name):
            getattr(module, name)
