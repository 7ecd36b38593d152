"""GAE by turns: three turns by hand, a brute-force recursion in Python, and what the three units must agree on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from valor import algorithms
from valor.algorithms.turns import Turns
from valor.errors import UserError

Turn = list[int]  # positions of its policy tokens
Estimate = tuple[Tensor, Tensor]


def estimate(case: dict[str, Tensor], unit: str, **options: object) -> Estimate:
    return algorithms.compute_advantages("gae", **case, gae_unit=unit, whitening="none", **options)  # type: ignore[arg-type]


def turns_of(mask: Tensor, turn_ids: Tensor) -> list[Turn]:
    """The policy tokens of a row, turn by turn."""
    turns: dict[int, Turn] = {}
    for position in range(len(mask)):
        if mask[position]:
            turns.setdefault(int(turn_ids[position]), []).append(position)
    return list(turns.values())


def rewards_by_hand(rewards: Tensor, turns: list[Turn]) -> dict[int, float]:
    """Reward of each policy token, with those of the observations behind it; the first also has what is before it."""
    tokens = [position for turn in turns for position in turn]
    credited = dict.fromkeys(tokens, 0.0)
    for position, reward in enumerate(rewards.tolist()):
        credited[max((t for t in tokens if t <= position), default=tokens[0])] += reward
    return credited


def brute_force(
    case: dict[str, Tensor],
    unit: str,
    between: tuple[float, float] = (1.0, 1.0),
    end: Tensor | None = None,
    gamma: float = 1.0,
    lambdas: tuple[float, float] = (1.0, 1.0),
) -> Estimate:
    """By the definition, one turn and one token after the other: (γ, λ) `between` turns; γ and the λ of advantages and
    returns inside them."""
    advantages, returns = (torch.zeros(case["values"].shape, dtype=torch.float64) for _ in range(2))
    for row, values in enumerate(case["values"].tolist()):
        turns = turns_of(case["response_mask"][row], case["turn_ids"][row])
        reward = rewards_by_hand(case["rewards"][row], turns) if turns else {}
        following = (0.0 if end is None else float(end[row]), 0.0)  # V and A of the turn after this one
        for turn in reversed(turns):
            first, total = values[turn[0]], sum(reward[t] for t in turn)
            after = between[0] * (following[0] + between[1] * following[1])
            following = (first, total + after - first)
            if unit == "turn":
                for t in turn:
                    advantages[row, t], returns[row, t] = total + after - first, total + after
                continue
            for out, lam, add_value in ((advantages, lambdas[0], 0), (returns, lambdas[1], 1)):
                ahead = None
                for t in reversed(turn):
                    if ahead is None:
                        carried = reward[t] + after - values[t]
                    else:
                        carried = reward[t] + gamma * values[ahead] - values[t] + gamma * lam * carried
                    out[row, t], ahead = carried + add_value * values[t], t
    return advantages, returns


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Tensor]:
    """Rows of turns with observations between them; now and then a turn loses tokens of its mask, or all of them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100_000)))
    length = st.integers(0, 3)
    rows = draw(st.lists(st.lists(st.tuples(length, st.integers(1, 4)), max_size=5), min_size=1, max_size=4))
    width = max(max(sum(a + b for a, b in row) for row in rows), 1)
    turn_ids = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = 0
        number = draw(st.integers(0, 2))  # an episode's later rows do not begin with turn 1
        for observed, spoken in row:
            number, at = number + 1, at + observed
            turn_ids[i, at : at + spoken] = number
            at += spoken
    kept = torch.rand(turn_ids.shape, generator=generator) < draw(st.sampled_from((0.6, 1.0)))
    mask = ((turn_ids > 0) & kept).float()
    rewards = torch.randn(turn_ids.shape, generator=generator) * mask.any(1, keepdim=True)
    values = torch.randn(turn_ids.shape, generator=generator)
    return {"rewards": rewards, "values": values, "response_mask": mask, "turn_ids": turn_ids}


shares = st.sampled_from((0.0, 0.5, 0.95, 1.0))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases(), between=st.tuples(shares, shares), gamma=shares, lambdas=st.tuples(shares, shares))
def test_both_units_equal_brute_force(
    case: dict[str, Tensor], between: tuple[float, float], gamma: float, lambdas: tuple[float, float]
) -> None:
    rows = len(case["rewards"])
    end, cut_off = torch.linspace(-1, 2, rows), torch.arange(rows) % 2 == 0
    options = {"gamma_turn": between[0], "lam_turn": between[1], "bootstrap_mask": cut_off, "bootstrap_values": end}
    found = estimate(case, "turn", **options)
    expected = brute_force(case, "turn", between, end=end * cut_off)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)
    inside = {"gamma": gamma, "lam_actor": lambdas[0], "lam_critic": lambdas[1]}
    found = estimate(case, "bilevel", **options, **inside)
    expected = brute_force(case, "bilevel", between, end * cut_off, gamma, lambdas)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def three_turns() -> dict[str, Tensor]:
    """Turns of 2, 1 and 2 tokens; 0.1 for the second token, 0.2 on the observation after turn 2, 1 at the end."""
    turn_ids = torch.tensor([[1, 1, 0, 0, 2, 0, 3, 3, 0]])
    return {
        "rewards": torch.tensor([[0, 0.1, 0, 0, 0, 0.2, 0, 1, 0]]),
        "values": torch.tensor([[0.5, 0.9, 7, 7, 0.25, 7, 0.5, 0.75, 7]]),
        "response_mask": (turn_ids > 0).float(),
        "turn_ids": turn_ids,
    }


def at_tokens(x: Tensor) -> list[float]:
    assert not x[0, [2, 3, 5, 8]].any()
    return x[0, [0, 1, 4, 6, 7]].tolist()


def test_three_turns_by_hand() -> None:
    """γ = λ = ½ between turns: δ = 0.1 + ½·0.25 − 0.5, 0.2 + ½·0.5 − 0.25, 1 − 0.5; A = δ + ¼ A of the next turn."""
    advantages, returns = estimate(three_turns(), "turn", gamma_turn=0.5, lam_turn=0.5)
    first, second, third = -0.275 + 0.25 * 0.325, 0.2 + 0.25 * 0.5, 0.5
    assert at_tokens(advantages) == pytest.approx([first, first, second, third, third])
    assert at_tokens(returns) == pytest.approx([first + 0.5] * 2 + [second + 0.25] + [third + 0.5] * 2)


def test_three_turns_by_hand_with_tokens_inside() -> None:
    """The same between turns, so that ½ (0.25 + ½·0.325) = 0.20625 follows turn 1 and 0.375 turn 2; λ = ½ inside."""
    advantages, returns = estimate(three_turns(), "bilevel", gamma_turn=0.5, lam_turn=0.5, lam=0.5)
    last_of_first, last = 0.1 + 0.20625 - 0.9, 1 - 0.75
    expected = [0.9 - 0.5 + 0.5 * last_of_first, last_of_first, 0.2 + 0.375 - 0.25, 0.75 - 0.5 + 0.5 * last, last]
    assert at_tokens(advantages) == pytest.approx(expected)
    values = [0.5, 0.9, 0.25, 0.5, 0.75]
    assert at_tokens(returns) == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases(), gamma=shares, lam=shares)
def test_what_the_units_agree_on(case: dict[str, Tensor], gamma: float, lam: float) -> None:
    mask = case["response_mask"]
    # Nothing is discounted: bilevel is plain GAE, and a turn has the advantage of its first token.
    token, bilevel, turn = (estimate(case, unit) for unit in ("token", "bilevel", "turn"))
    for one, other in zip(token, bilevel, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    starts = Turns(case["turn_ids"], mask).starts
    torch.testing.assert_close(turn[0][starts], token[0][starts], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turn[1][starts], token[1][starts], atol=1e-5, rtol=1e-5)
    # Episodes of one turn: bilevel is plain GAE whatever γ and λ; the turn's advantage is Σ r − V_first.
    single = {**case, "turn_ids": torch.ones_like(case["turn_ids"])}
    plain, inside = estimate(single, "token", gamma=gamma, lam=lam), estimate(single, "bilevel", gamma=gamma, lam=lam)
    for one, other in zip(plain, inside, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    whole, _ = estimate(single, "turn", gamma_turn=gamma, lam_turn=lam)
    first = Turns(single["turn_ids"], mask).starts
    baseline = (case["values"] * first).sum(1, keepdim=True)
    torch.testing.assert_close(whole, (case["rewards"].sum(1, keepdim=True) - baseline) * mask, atol=1e-5, rtol=1e-5)
    # Turns of one token: every unit is GAE by the factors between turns.
    numbers = {**case, "turn_ids": mask.cumsum(1).long()}
    plain = estimate(numbers, "token", gamma=gamma, lam=lam)
    for unit in ("turn", "bilevel"):
        for one, other in zip(plain, estimate(numbers, unit, gamma_turn=gamma, lam_turn=lam), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases(), gamma_turn=shares, gamma=shares, lam=shares)
def test_bilevel_with_lambda_1_between_turns_is_vagens(
    case: dict[str, Tensor], gamma_turn: float, gamma: float, lam: float
) -> None:
    """Its turns are chained by the values at their last tokens; what the last token gets replaces its TD error."""
    case["rewards"] = torch.zeros_like(case["rewards"])
    expected = torch.zeros_like(case["values"])
    for row, values in enumerate(case["values"].tolist()):
        value, advantage = 0.0, 0.0
        for turn in reversed(turns_of(case["response_mask"][row], case["turn_ids"][row])):
            case["rewards"][row, turn[-1]] = reward = 0.5 + row
            advantage = reward + gamma_turn * value - values[turn[-1]] + gamma_turn * advantage
            value = values[turn[-1]]
            carried = expected[row, turn[-1]] = advantage
            for t, ahead in zip(turn[-2::-1], turn[:0:-1], strict=True):
                carried = expected[row, t] = gamma * values[ahead] - values[t] + gamma * lam * carried
    found, _ = estimate(case, "bilevel", gamma_turn=gamma_turn, gamma=gamma, lam=lam)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_turn_of_a_rejected_token_and_a_turn_without_any_token() -> None:
    case = three_turns()
    case["response_mask"][0, [0, 4]] = 0.0  # the first token of turn 1, the only one of turn 2
    case["values"][0, [0, 4]] = torch.nan
    advantages, _ = estimate(case, "turn")
    assert advantages[0].tolist() == pytest.approx([0, 1.3 - 0.9, 0, 0, 0, 0, 0.5, 0.5, 0])


def test_values_inside_a_turn_are_not_read_by_the_unit_turn() -> None:
    case = three_turns()
    other = {**case, "values": case["values"].clone()}
    other["values"][0, [1, 7]] = torch.tensor([-3.0, torch.nan])
    for one, same in zip(estimate(case, "turn"), estimate(other, "turn"), strict=True):
        assert torch.equal(one, same)


def test_whitening_counts_tokens() -> None:
    case = three_turns()
    plain, _ = estimate(case, "turn")
    white, _ = algorithms.compute_advantages("gae", **case, gae_unit="turn")  # type: ignore[arg-type]
    present = plain[case["response_mask"] == 1]
    torch.testing.assert_close(white[case["response_mask"] == 1], (present - present.mean()) / present.std())


@pytest.mark.parametrize(
    ("unit", "options", "message"),
    [
        ("token", {"lam_turn": 0.9}, "no turns to discount"),
        ("turn", {"lam": 0.9}, "no tokens to discount"),
        ("turn", {"lam_critic": 0.9}, "no tokens to discount"),
        ("turn", {"adaptive_lam_alpha": 0.1}, "adaptive_lam_alpha"),
        ("bilevel", {"lam_positions": [0.5, 1.0]}, "lam_positions"),
        ("bilevel", {"lam": 1.5}, "between 0 and 1"),
        ("turn", {"gamma_turn": 1.5}, "between 0 and 1"),
        ("turns", {}, "unknown gae_unit 'turns'; did you mean turn"),
        ("turn", {"turn_ids": None}, r"turn_ids \[B, T\]"),
    ],
)
def test_what_a_unit_does_not_take_is_said(unit: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        estimate({**three_turns(), **options}, unit)


def test_turns_out_of_order_are_an_error_of_the_caller() -> None:
    case = three_turns()
    case["turn_ids"] = torch.tensor([[2, 2, 0, 0, 1, 0, 3, 3, 0]])
    with pytest.raises(AssertionError, match="rise along a row"):
        estimate(case, "turn")


def test_rows_and_batches_without_a_token() -> None:
    for shape in ((2, 3), (0, 3), (2, 0)):
        empty = torch.zeros(shape)
        case = {"rewards": empty, "values": empty, "response_mask": empty, "turn_ids": empty.long()}
        for unit in ("turn", "bilevel"):
            for result in estimate(case, unit):
                assert result.shape == shape and not result.any()
