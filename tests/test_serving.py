"""The token-budget runner: a whole model over the paged cache equals one-shot generation."""

from __future__ import annotations

import threading

import families
import pytest
import torch

import mla_ops
import mla_ops.hf
from mla_ops import env
from mla_ops.errors import InvalidInputError
from mla_ops.hf.paged import PagedModelCache, paged
from mla_ops.hf.serving import TokenBudgetRunner

LENGTHS = (37, 5, 80)  # cases.md 1: arrivals at steps 0, 2 and 3
NEW_TOKENS = 6


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    draw = (torch.randint(3, families.VOCAB_SIZE, (n,), generator=generator) for n in LENGTHS)
    return [ids.tolist() for ids in draw]


def _stock(model, prompts):
    """What stock generation says: tokens, and the logits they were chosen from."""
    model.generation_config.eos_token_id = None
    expected = []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = tuple(result.sequences[0, len(prompt) :].tolist())
        expected.append((tokens, torch.cat(result.logits)))
    return expected


@pytest.fixture(scope="module", params=["deepseek_v2", "deepseek_v3_yarn", "minicpm3"])
def one_shot(request):
    """A model, patched, and what stock generation says."""
    model = families.FAMILIES[request.param].build()
    expected = _stock(model, _prompts())
    return mla_ops.patch(model), expected


@pytest.fixture(scope="module")
def demo():
    """The model of the demo, patched, three pieces of text, and what stock generation says."""
    loading = pytest.importorskip("mla_ops.demo.model")
    folder = env.cache_dir() / "smollm2-135m-instruct-mla-float32"
    if not loading.is_intact(folder, f"{loading.SMOLLM2.sha256}-{loading.RECIPE}"):
        pytest.skip(
            f"the model of the demo is not in {env.cache_dir()} (`mla-ops accuracy` puts it there)"
        )
    loaded = loading.load_pretrained(torch.float32, env.cache_dir())
    ids = loaded.tokenizer(loaded.filler).input_ids
    prompts = [
        ids[start : start + length] for start, length in zip((0, 200, 400), LENGTHS, strict=True)
    ]
    expected = _stock(loaded.model, prompts)
    return mla_ops.patch(loaded.model), prompts, expected


def _serve(model, prompts=None, **options):
    runner = TokenBudgetRunner(model, **options)
    prompts, done = prompts or _prompts(), {}
    names = [runner.add(prompts[0], NEW_TOKENS)]
    for prompt, steps in ((prompts[1], 2), (prompts[2], 1)):
        for _ in range(steps):
            done.update(runner.step())
        names.append(runner.add(prompt, NEW_TOKENS))
    done.update(runner.run())
    return [done[name] for name in names], runner


@pytest.mark.parametrize("budget", [1, 2, 3, 16, 64, 1024])
@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_tokens_do_not_depend_on_budget_or_pages(one_shot, budget, block_size):
    model, expected = one_shot
    for workspace in (16, 64, 65536):
        completions, _ = _serve(
            model,
            token_budget=budget,
            num_blocks=160 // block_size + 6,
            block_size=block_size,
            workspace_tokens=workspace,
        )
        for completion, (tokens, logits) in zip(completions, expected, strict=True):
            assert completion.tokens == tokens
            torch.testing.assert_close(completion.logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 2, 3, 16, 64, 1024])
@pytest.mark.parametrize(
    ("block_size", "workspace"), [(1, 64), (16, 16), (16, 65536), (64, 64), (64, 65536)]
)
def test_the_demo_model_says_the_same(demo, budget, block_size, workspace):
    model, prompts, expected = demo
    completions, _ = _serve(
        model,
        prompts,
        token_budget=budget,
        num_blocks=160 // block_size + 6,
        block_size=block_size,
        workspace_tokens=workspace,
    )
    for completion, (tokens, logits) in zip(completions, expected, strict=True):
        assert completion.tokens == tokens
        scale = logits.abs().max().item()
        torch.testing.assert_close(completion.logits, logits, rtol=0.0, atol=1e-4 * scale)


@pytest.mark.parametrize("budget", [1, 3, 16, 1024])
def test_prompts_are_scored_however_they_are_cut(one_shot, budget):
    model, expected = one_shot
    runner = TokenBudgetRunner(
        model, token_budget=budget, num_blocks=40, block_size=4, workspace_tokens=16
    )
    scored = [runner.add(prompt, 2, prompt_logprobs=True) for prompt in _prompts()]
    plain = runner.add(_prompts()[0], 2)
    done = runner.run()
    assert done[plain].prompt_logprobs is None
    for name, prompt, (tokens, logits) in zip(scored, _prompts(), expected, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        want = scores.gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(done[name].prompt_logprobs, want, rtol=1e-5, atol=1e-5)
        assert done[name].tokens == tokens[:2]
        torch.testing.assert_close(done[name].logits, logits[:2], rtol=1e-5, atol=1e-5)


def test_a_prompt_of_one_token_has_no_scores(one_shot):
    runner = TokenBudgetRunner(one_shot[0], token_budget=4, num_blocks=2, block_size=4)
    name = runner.add([5], 1, prompt_logprobs=True)
    assert runner.run()[name].prompt_logprobs.shape == (0,)


def test_blocks_are_returned_and_used_again(one_shot):
    model, expected = one_shot
    completions, runner = _serve(model, token_budget=64, num_blocks=40, block_size=4)
    assert sorted(runner._free) == list(range(40))
    assert [c.tokens for c in completions] == [tokens for tokens, _ in expected]


def test_fp8_cache_is_close_and_not_equal(one_shot):
    model, expected = one_shot
    options = {"token_budget": 64, "num_blocks": 16, "block_size": 16}
    scale = torch.tensor(0.05)
    completions, _ = _serve(model, **options, cache_dtype=torch.float8_e4m3fn, kv_scale=scale)
    # The first token is chosen from activations alone, the second one reads the cache.
    exact, rounded = expected[0][1][1], completions[0].logits[1]
    error = (rounded - exact).abs().max() / exact.abs().max()
    assert 1e-6 < error < 0.2


def test_a_request_that_never_fits_is_refused(one_shot):
    model, _ = one_shot
    runner = TokenBudgetRunner(model, token_budget=4, num_blocks=2, block_size=4)
    with pytest.raises(InvalidInputError, match="needs 3 blocks, the cache has 2"):
        runner.add([1] * 8, max_new_tokens=4)
    with pytest.raises(InvalidInputError, match="at least one prompt token"):
        runner.add([])


def test_requests_that_block_each_other_are_reported(one_shot):
    model, _ = one_shot
    runner = TokenBudgetRunner(model, token_budget=8, num_blocks=2, block_size=4)
    for _ in range(2):
        runner.add([1, 2, 3, 4], max_new_tokens=2)
    with pytest.raises(InvalidInputError, match="none fits"):
        runner.run()


def test_budget_below_one_is_refused(one_shot):
    with pytest.raises(InvalidInputError, match="token_budget must be at least 1, got 0"):
        TokenBudgetRunner(one_shot[0], token_budget=0, num_blocks=1, block_size=1)


def test_a_batch_of_rows_is_refused(one_shot):
    model, _ = one_shot
    cache = PagedModelCache.allocate(model, num_blocks=2, block_size=4)
    metadata = mla_ops.build_metadata([2], [2], [[0]], block_size=4, workspace_tokens=4)
    ids = torch.zeros(2, 1, dtype=torch.long)
    with (
        paged(cache, metadata),
        torch.no_grad(),
        pytest.raises(InvalidInputError, match=r"shape \[1, T\]"),
    ):
        model(input_ids=ids, use_cache=False)


def test_a_model_without_mla_has_no_cache():
    with pytest.raises(InvalidInputError, match="has no MLA layer"):
        PagedModelCache.allocate(torch.nn.Linear(2, 2), num_blocks=1, block_size=1)


def test_outside_of_the_block_nothing_is_paged(one_shot):
    model, _ = one_shot
    ids = families.sample_input_ids(batch=1)
    cache = PagedModelCache.allocate(model, num_blocks=2, block_size=16)
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        metadata = mla_ops.build_metadata(
            [ids.shape[1]], [ids.shape[1]], [[0]], block_size=16, workspace_tokens=4
        )
        with paged(cache, metadata):
            inside = model(input_ids=ids, use_cache=False).logits
        after = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(before, after)
    torch.testing.assert_close(before, inside, rtol=1e-5, atol=1e-5)
    assert all(bool(layer.any()) for layer in cache.layers.values())


def test_a_layer_that_runs_stock_code_is_refused(one_shot):
    """Stock code would see the new tokens only, and nothing would say so."""
    model, _ = one_shot
    cache = PagedModelCache.allocate(model, num_blocks=2, block_size=4)
    metadata = mla_ops.build_metadata([2], [2], [[0]], block_size=4, workspace_tokens=4)
    ids = torch.zeros(1, 2, dtype=torch.long)
    handle = model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(InvalidInputError, match="cannot use a paged cache: kv_b_proj has forw"):
            PagedModelCache.allocate(model, num_blocks=2, block_size=4)
        with (
            paged(cache, metadata),
            torch.no_grad(),
            pytest.raises(InvalidInputError, match="cannot use a paged cache: it runs stock code"),
        ):
            model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    with (
        paged(cache, metadata),
        torch.no_grad(),
        pytest.raises(InvalidInputError, match="cannot use a paged cache: output_attentions"),
    ):
        model(input_ids=ids, use_cache=False, output_attentions=True)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("deepseek_v32", "indexed_attention"),
        ("kimi_linear", "linear_attention"),
        ("dots3_note", "indexed_attention, sliding_attention"),
    ],
)
def test_a_family_that_the_cache_cannot_serve_is_refused(name, kinds):
    """Linear layers would take the whole batch for one sequence, and nothing would say so."""
    model = mla_ops.patch(families.FAMILIES[name].build())
    with pytest.raises(InvalidInputError, match=f"paged cache: the model has layers of {kinds}$"):
        TokenBudgetRunner(model, token_budget=1, num_blocks=1, block_size=1)


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("deepseek_v32", 0, "sparse attention"),
        ("hy_v4", 0, "sinks"),
        ("dots3_note", 1, "a sliding window"),
    ],
)
def test_a_layer_that_the_cache_cannot_serve_is_refused(name, layer, reason):
    """Also where the caches were not allocated for the model."""
    model = mla_ops.patch(families.FAMILIES[name].build())
    model.model.layers = model.model.layers[layer : layer + 1]
    model.config.layer_types = model.config.layer_types[layer : layer + 1]
    cache = PagedModelCache({}, block_size=4, num_blocks=2)
    metadata = mla_ops.build_metadata([2], [2], [[0]], block_size=4, workspace_tokens=4)
    with (
        paged(cache, metadata),
        torch.no_grad(),
        pytest.raises(InvalidInputError, match=f"cannot use a paged cache: .*{reason}"),
    ):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)


def test_a_compiled_model_runs_eagerly():
    """A graph cannot know of the block: it would attend to the new tokens alone."""
    model, prompt = families.FAMILIES["minicpm3"].build(), _prompts()[1]
    ((expected, _),) = _stock(model, [prompt])
    runner = TokenBudgetRunner(mla_ops.patch(model), token_budget=2, num_blocks=8, block_size=4)
    for layer in model.model.layers:
        layer.self_attn.compile(backend="eager")
    name = runner.add(prompt, NEW_TOKENS)
    assert runner.run()[name].tokens == expected


def test_a_block_of_another_thread_stays_eager():
    """The first block that ends leaves the other one as it is, the last one leaves nothing."""
    batch = (
        PagedModelCache({}, block_size=4, num_blocks=2),
        mla_ops.build_metadata([2], [2], [[0]], block_size=4, workspace_tokens=4),
    )
    opened, close, graphs = threading.Event(), threading.Event(), []

    def hold():
        with paged(*batch):
            opened.set()
            close.wait()

    thread = threading.Thread(target=hold, daemon=True)
    one_more = torch.compile(lambda x: x + 1, backend=lambda gm, _: graphs.append(gm) or gm.forward)
    with paged(*batch):
        thread.start()
        opened.wait()
    one_more(torch.ones(1))
    assert not graphs
    close.set()
    thread.join()
    one_more(torch.ones(1))
    assert len(graphs) == 1


def test_a_model_that_is_not_patched_is_refused():
    model = families.FAMILIES["deepseek_v3"].build()
    with pytest.raises(InvalidInputError, match="cache: the model is not patched"):
        PagedModelCache.allocate(model, num_blocks=2, block_size=4)
