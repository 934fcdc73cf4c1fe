"""Rules about lost time, each on both sides of its threshold, with the sentence it says."""

from __future__ import annotations

import pytest

from manyhands.analysis import causes
from manyhands.analysis.facts import Context, Facts, Verdict
from manyhands.analysis.scaling import Baseline
from manyhands.core.statistics import Estimate, Summary
from manyhands.records.record import RunRecord, StepTimes
from manyhands.testing.records import record

COMPUTE = {"forward": 0.1, "backward": 0.2}


def step(**phases: float) -> dict[str, float]:
    """A step in milliseconds."""
    return {name: value / 1000 for name, value in phases.items()}


def gang(phases: dict[str, float], **fields: object) -> RunRecord:
    found = {"strategy": "allreduce", "workers": 2, "batch": 256} | fields
    return record(phases=phases, **found)


def handing(found: RunRecord, nbytes: float) -> RunRecord:
    """The same, with so many bytes a step and rank."""
    books = {"all_reduce": {"calls": found.steps, "bytes": nbytes * found.steps, "seconds": 1.0}}
    return found.model_copy(update={"traffic": [books] * found.spec.ranks})


def paced(found: RunRecord, *ranks: dict[str, float], high: float = 1.0) -> RunRecord:
    """The same, with a mean step for each rank."""
    measured = []
    for phases in ranks:
        mean = sum(phases.values())
        measured.append(
            StepTimes(steps=100, mean=mean, low=mean, median=mean, high=high * mean, phases=phases)
        )
    return found.model_copy(update={"step_times": measured})


def serving(found: RunRecord, busy: float) -> RunRecord:
    """The same, with a server that computes for this share of its time."""
    server = {"optimizer": busy, "wait": 1 - busy}
    return found.model_copy(update={"phases": [server, *found.phases[1:]]})


def cut(found: RunRecord, *percent: float) -> RunRecord:
    """The same, with stages that were measured to have these shares of the work."""
    stages = [{"first": number, "seconds": share / 100} for number, share in enumerate(percent)]
    return found.model_copy(update={"choices": {"stages": stages}})


def one_thread(rate: float, batch: int = 128) -> Baseline:
    return Baseline(1, Summary(rate, rate, rate, 1), batch, "one worker, one thread")


def judged(
    rule: str, found: RunRecord, baseline: Baseline | None = None, **known: Estimate
) -> Verdict | None:
    return dict(causes.RULES)[rule](Facts(found, Context(baseline, **known)))


def said(rule: str, found: RunRecord, baseline: Baseline | None = None, **known: Estimate) -> str:
    verdict = judged(rule, found, baseline, **known)
    assert verdict is not None
    assert verdict.rule == rule
    return verdict.text


def test_communication_is_blamed_from_15_per_cent_on():
    assert judged("communication", gang(step(forward=30, backward=55.1, communication=14.9))) is None
    verdict = judged("communication", gang(step(forward=30, backward=54.9, communication=15.1)))
    assert verdict is not None
    assert verdict.lost == pytest.approx(0.151)


def test_communication_names_the_batch_and_the_averages_that_make_up_for_it():
    # (40 k + 2) / (40 k + 2 + 58) is 0.85 first at k = 16, 42 / (42 + 58 / k) at k = 8
    run = handing(gang(step(forward=15, backward=25, optimizer=2, communication=58)), 57e6)
    assert said("communication", run) == (
        "58 % of the step is exposed communication of 57 MB at 983 MB/s; at this bandwidth a batch of 4,096 "
        "would reach 92 % efficiency, `average --every 8` 85 %, but either may need more samples to the "
        "target."
    )


def test_a_batch_beyond_the_critical_one_is_no_advice():
    run = handing(gang(step(forward=15, backward=25, optimizer=2, communication=58)), 57e6)
    below = said("communication", run, critical_batch=Estimate(4_400.0, 2_400.0, 16_000.0))
    assert below.endswith(
        "at this bandwidth a batch of 4,096 would reach 92 % efficiency, `average --every 8` 85 %; the "
        "batch is "
        "below the critical batch of about 4,400, but rarer exchanges may need more samples to the target."
    )
    beyond = said("communication", run, critical_batch=Estimate(4_000.0, 2_400.0, 16_000.0))
    assert beyond.endswith(
        "at this bandwidth `average --every 8` would reach 85 % efficiency, but it may need more samples "
        "to the "
        "target."
    )


def test_where_only_a_batch_helps_it_is_said_that_it_is_below_the_critical_one():
    options = {"strategy": "average", "strategy_options": {"every": "end"}}
    run = gang(step(forward=30, backward=50, communication=20), **options)
    text = said("communication", run, critical_batch=Estimate(727.0, 433.0, 1_231.0))
    assert text.endswith(
        "a batch of 512 would reach 89 % efficiency; it is below the critical batch of about 730."
    )
    assert said("communication", run, critical_batch=Estimate(500.0, 433.0, 1_231.0)).endswith(
        "; neither a larger batch below the critical batch of about 500 nor rarer exchanges would make up "
        "for "
        "it: use fewer workers."
    )


def test_communication_that_was_not_counted_has_no_volume():
    run = gang(step(forward=30, backward=50, communication=20), traffic=[])
    assert said("communication", run).startswith(
        "20 % of the step is exposed communication; at this bandwidth"
    )


def test_an_average_is_made_rarer_than_it_is():
    run = handing(gang(step(forward=30, backward=50, communication=20), strategy="average"), 7.5e6)
    assert said("communication", run) == (
        "20 % of the step is exposed communication of 7.5 MB at 375 MB/s; at this bandwidth a batch of 512 "
        "would reach 89 % efficiency, `average --every 32` 89 %, but either may need more samples to the "
        "target."
    )


def test_a_server_is_asked_less_often():
    run = handing(gang(step(forward=30, backward=50, communication=20), strategy="server"), 7.5e6)
    assert "89 % efficiency, `server --push-every 2` 89 %, but either may need" in said("communication", run)


def test_a_batch_larger_than_the_data_is_no_advice():
    run = gang(step(forward=15, backward=25, optimizer=2, communication=58), batch=8192)
    assert said("communication", run).endswith(
        "at this bandwidth `average --every 8` would reach 85 % efficiency, but it may need more samples "
        "to the "
        "target."
    )


def test_where_nothing_helps_fewer_workers_are_the_advice():
    run = gang(step(forward=0.05, backward=0.05, communication=99.9))
    assert said("communication", run).endswith(
        "; neither a larger batch nor rarer exchanges would make up for it: use fewer workers."
    )


def test_an_average_at_the_end_cannot_be_made_rarer():
    options = {"strategy": "average", "strategy_options": {"every": "end"}}
    text = said("communication", gang(step(forward=30, backward=50, communication=20), **options))
    assert text.endswith(
        "at this bandwidth a batch of 512 would reach 89 % efficiency, but it may need more samples to the "
        "target."
    )


def test_stages_hand_over_more_with_a_larger_batch():
    run = handing(gang(step(forward=30, backward=50, communication=20), strategy="pipeline"), 1e6)
    assert said("communication", run) == (
        "20 % of the step is exposed communication of 1 MB at 50 MB/s; it grows with the batch: fewer "
        "stages, or sharing the batch with `allreduce`, would avoid it."
    )


def test_waiting_names_the_slowest_rank_from_10_per_cent_on():
    slow = step(forward=30, backward=60)
    little = paced(gang({}), step(forward=24, backward=48, wait=17.8), slow)
    assert judged("stragglers", little) is None
    much = paced(gang({}), step(forward=24, backward=48, wait=18.2), slow)
    assert said("stragglers", much) == (
        "10 % of the step is waiting for rank 1, which computes 25 % longer than the others; as fast as they "
        "are it would make the step 1.25x faster."
    )


def test_the_slowest_rank_is_named_with_its_host_if_there_are_several():
    quick, slow = step(forward=20, backward=40, wait=30), step(forward=30, backward=60)
    run = paced(gang({}, workers=4, hosts=["a", "a", "b", "b"]), quick, quick, slow, quick)
    assert "waiting for rank 2 on b, which computes 50 % longer" in said("stragglers", run)


def test_ranks_that_are_alike_wait_because_steps_vary():
    phases = step(forward=30, backward=50, wait=20)
    run = paced(gang({}), phases, phases, high=1.4)
    assert said("stragglers", run) == (
        "20 % of the step is waiting for each other, and no rank is slow enough to explain it (one step of "
        "ten "
        "takes 40 % longer than the median): look for what else runs on the machine; with `server` no worker "
        "waits for another."
    )


def test_where_workers_share_cores_nobody_is_a_straggler():
    """Four workers on two cores were told to use `server`, which was slower."""
    phases = step(forward=30, backward=47, wait=23)
    assert judged("stragglers", gang(phases, workers=4, cores=4)) is not None
    assert judged("stragglers", gang(phases, workers=4, cores=2)) is None
    assert judged("stragglers", gang(phases, workers=4, hosts=["a", "b", "a", "b"])) is not None


def test_a_server_that_sleeps_does_not_hide_that_workers_wait_for_it():
    """Two workers and a server on two cores: the server needs a core for a tenth of the time only."""
    run = serving(gang(step(forward=30, backward=50, wait=20), strategy="server"), busy=0.1)
    assert judged("oversubscribed", run) is None
    assert judged("stragglers", run) is not None
    crowd = serving(gang(step(forward=30, backward=50, wait=20), strategy="server", workers=4), busy=0.1)
    assert judged("oversubscribed", crowd) is not None
    assert judged("stragglers", crowd) is None


def test_a_rank_that_is_a_little_slower_does_not_explain_long_waits():
    """`62 % of the step is waiting for rank 0, which computes 9 % longer`: the machine was busy."""
    slow, quick = step(forward=3.27, backward=6.54, wait=10), step(forward=3, backward=6, wait=12)
    assert "waiting for each other" in said("stragglers", paced(gang({}), slow, quick))
    long = step(forward=10, backward=20)
    verdict = judged("stragglers", paced(gang({}), long, step(forward=3, backward=6, wait=21)))
    assert verdict is not None
    assert "for rank 0, which computes 233 % longer" in verdict.text
    assert verdict.lost == pytest.approx(0.7)


def test_a_rank_is_the_cause_if_it_explains_half_of_the_waiting():
    quick = step(forward=30, backward=50, wait=20)  # 10 ms on average
    assert "for each other" in said("stragglers", paced(gang({}), quick, step(forward=30, backward=54.9)))
    assert "for rank 1," in said("stragglers", paced(gang({}), quick, step(forward=30, backward=55.1)))


def test_waiting_for_a_server_is_said_so():
    phases = step(forward=30, backward=50, wait=20)
    run = paced(gang({}, strategy="server"), phases, phases, phases)
    assert said("stragglers", run) == (
        "20 % of the step is waiting for 1 server to answer; `--servers 2` would halve what each has to do, "
        "`--push-every 2` how often it is asked."
    )


def test_layers_wait_for_each_other_and_a_pipeline_would_less():
    run = gang(step(forward=17, backward=33, wait=50), strategy="layers")
    assert judged("stragglers", run) is None
    assert said("bubble", run) == (
        "50 % of the step the 2 stages wait for each other; one batch at a time leaves 50 % idle by itself, "
        "`pipeline --micro-batches 8` would leave 11 %."
    )


def test_stages_of_unequal_work_stay_idle_with_any_number_of_micro_batches():
    """`--micro-batches 16` was said to leave 16 % idle, as if four stages of 8 to 66 % were equal."""
    run = cut(
        gang(step(forward=10, backward=20, wait=90), strategy="layers", workers=4, cores=4), 8, 66, 17, 9
    )
    # 1 - 16 / (4 (1 + 15 x 0.66)) and 1 - 1 / (4 x 0.66)
    assert said("bubble", run) == (
        "75 % of the step the 4 stages wait for each other; one batch at a time leaves 75 % idle by itself, "
        "`pipeline --micro-batches 16` would leave 63 %; one stage has 66 % of the work (measured: 8 | 66 "
        "| 17 | 9 "
        "%), so "
        "no number of micro-batches leaves less than 62 % idle: its blocks allow no more even cut, so use "
        "fewer "
        "stages."
    )
    by_hand = gang(
        step(forward=10, backward=20, wait=90),
        strategy="layers",
        workers=4,
        cores=4,
        strategy_options={"cut": [1, 2, 3]},
    )
    assert said("bubble", cut(by_hand, 8, 66, 17, 9)).endswith(
        "62 % idle: without `--cut` it is cut as evenly as its blocks allow."
    )
    even = said("bubble", cut(run, 24, 26, 25, 25))
    assert even.endswith("`pipeline --micro-batches 16` would leave 18 %.")


def test_stages_that_share_cores_are_said_to():
    run = cut(gang(step(forward=10, backward=20, wait=90), strategy="layers", workers=4), 25, 25, 25, 25)
    assert judged("oversubscribed", run) is None, "one stage computes at a time"
    assert said("bubble", run).endswith(
        "would leave 16 %; the stages share 2 cores, and these shares are for one core per stage."
    )
    assert ", if all stages have the same work; the stages share 2 cores" in said("bubble", cut(run))


def test_more_micro_batches_than_samples_are_no_advice():
    run = gang(step(forward=10, backward=20, wait=30), strategy="layers", batch=4)
    assert "`pipeline --micro-batches 4` would leave 20 %" in said("bubble", run)


@pytest.mark.parametrize(("waiting", "blamed"), [(9.9, False), (10.1, True)])
def test_a_bubble_is_blamed_from_10_per_cent_on(waiting: float, blamed: bool):
    phases = step(forward=30, backward=70 - waiting, wait=waiting)
    run = gang(phases, strategy="pipeline", strategy_options={"micro_batches": 4})
    assert (judged("bubble", run) is not None) is blamed


def test_a_pipeline_of_few_micro_batches_wants_more():
    options = {"strategy": "pipeline", "strategy_options": {"micro_batches": 2}}
    assert said("bubble", gang(step(forward=25, backward=40, wait=35), **options)) == (
        "35 % of the step the 2 stages wait for each other; 2 micro-batches leave 33 % idle by themselves, "
        "`--micro-batches 8` would leave 11 %."
    )


def test_a_pipeline_of_enough_micro_batches_is_cut_badly():
    run = gang({}, strategy="pipeline", strategy_options={"micro_batches": 8})
    run = paced(run, step(forward=20, backward=40, wait=40), step(forward=30, backward=60, wait=10))
    assert said("bubble", run) == (
        "25 % of the step the 2 stages wait for each other; 8 micro-batches leave 23 % idle by themselves; "
        "one "
        "stage has 60 % of the work (measured: 40 | 60 %), so no number of micro-batches leaves less than "
        "17 % idle: "
        "its "
        "blocks allow no more even cut; with `allreduce` no worker waits for a stage."
    )


@pytest.mark.parametrize(("waiting", "blamed"), [(9.9, False), (10.1, True)])
def test_data_is_blamed_from_10_per_cent_on(waiting: float, blamed: bool):
    run = record(phases=step(data=waiting, forward=30, backward=70 - waiting))
    assert (judged("data", run) is not None) is blamed


def test_data_starvation_says_what_it_costs():
    assert said("data", record(phases=step(data=20, forward=30, backward=50))) == (
        "20 % of the step is waiting for data; held in memory or prepared beforehand it would make the step "
        "1.25x faster."
    )


def test_a_small_share_of_the_batch_is_blamed_if_a_sample_takes_a_quarter_longer():
    baseline = one_thread(10_000)  # 0.1 ms a sample
    near = gang(step(forward=1.3, backward=2.6), batch=64)  # 32 per worker, 0.122 ms each
    assert judged("small-batch", near, baseline) is None
    far = gang(step(forward=1.5, backward=3.3, communication=0.2), batch=64)  # 0.15 ms each
    verdict = judged("small-batch", far, baseline)
    assert verdict is not None
    assert verdict.lost == pytest.approx(0.96 / 3)
    assert verdict.text == (
        "each worker computes on 32 samples per step and takes 1.5x as long per sample as one worker with "
        "one thread does with 128; a batch of 256 may make up for it, but may need more samples to the "
        "target."
    )
    assert said("small-batch", far, baseline, critical_batch=Estimate(300.0, 200.0, 500.0)).endswith(
        "; a batch of 256 may make up for it."
    )
    assert said("small-batch", far, baseline, critical_batch=Estimate(200.0, 100.0, 500.0)).endswith(
        ", but is beyond the critical batch of about 200: fewer workers are better."
    )


def test_a_share_as_large_as_the_baseline_s_is_not_too_small():
    slow = gang(step(forward=7, backward=13), batch=256)  # 128 per worker, 0.156 ms each
    assert judged("small-batch", slow, one_thread(10_000)) is None
    assert said("contention", slow, one_thread(10_000)) == (
        "a worker takes 1.6x as long for a sample as one worker with one thread, though its batch is no "
        "smaller and every worker has a core. Perhaps they compete for memory bandwidth and caches: fewer "
        "may "
        "do as much."
    )
    quick = gang(step(forward=5, backward=10), batch=256)  # 0.117 ms
    assert judged("contention", quick, one_thread(10_000)) is None


def test_a_baseline_that_is_not_sure_blames_nobody():
    slow = gang(step(forward=7, backward=13), batch=256)
    unsure = Baseline(1, Summary(10_000.0, 6_000.0, 16_000.0, 1), 128, "one worker, one thread")
    assert judged("contention", slow, unsure) is None


@pytest.mark.parametrize("rule", ["small-batch", "contention"])
def test_without_a_baseline_or_with_too_few_cores_nobody_can_tell(rule: str):
    phases = step(forward=100, backward=200)
    assert judged(rule, gang(phases)) is None
    assert judged(rule, gang(phases, workers=4), one_thread(10_000)) is None
    assert judged(rule, gang(phases, threads=2, cores=8), one_thread(10_000)) is None


@pytest.mark.parametrize(
    ("rate", "lost", "text"),
    [
        (
            14_000,
            0.3,
            " and do 70 % of what 2 cores can do (2x one worker with one thread): at most 30 % is lost by "
            "that.",
        ),
        (
            17_000,
            0.0,
            "; their speed is not told apart from what 2 cores can do (2x one worker with one thread).",
        ),
        (41_000, 0.0, ", so at most 2 of their threads run at a time."),
    ],
)
def test_more_threads_than_cores_lose_what_the_cores_could_do(rate: float, lost: float, text: str):
    """`with 4 cores up to 2.00x faster` was said of runs that had nearly all of what two cores can give."""
    verdict = judged("oversubscribed", gang(COMPUTE, workers=4, rate=rate), one_thread(10_000))
    assert verdict is not None
    assert verdict.lost == pytest.approx(lost)
    assert verdict.text == f"4 workers share 2 cores{text}"


def test_enough_cores_are_not_oversubscribed():
    assert judged("oversubscribed", gang(COMPUTE), one_thread(10_000)) is None
    assert judged("oversubscribed", gang(COMPUTE, workers=4, cores=4), one_thread(10_000)) is None


@pytest.mark.parametrize(
    ("fields", "who"),
    [
        ({"threads": 2}, "2 workers x 2 threads share 2 cores"),
        ({"strategy": "server", "workers": 4}, "5 processes share 2 cores"),
        ({"strategy": "single", "workers": 1, "threads": 4}, "1 worker with 4 threads shares 2 cores"),
    ],
)
def test_oversubscription_says_who_shares_what(fields: dict, who: str):
    assert said("oversubscribed", gang(COMPUTE, **fields)) == (
        f"{who}, so at most 2 of their threads run at a time."
    )


@pytest.mark.parametrize(("waiting", "crowded"), [(45, True), (50, False)])
def test_stages_that_sleep_need_no_core(waiting: float, crowded: bool):
    phases = step(forward=40, backward=60 - waiting, wait=waiting)  # 4 stages x 55 % = 2.2 busy, or 2.0
    run = gang(phases, strategy="pipeline", workers=4, strategy_options={"micro_batches": 4})
    assert (judged("oversubscribed", run) is not None) is crowded


def test_hosts_are_crowded_one_by_one():
    assert judged("oversubscribed", gang(COMPUTE, workers=4, hosts=["a", "b", "a", "b"])) is None


@pytest.mark.parametrize(("share", "blamed"), [(14.9, False), (15.1, True)])
def test_the_optimizer_is_blamed_from_15_per_cent_on(share: float, blamed: bool):
    run = record(phases=step(forward=30, backward=70 - share, optimizer=share))
    assert (judged("optimizer", run) is not None) is blamed


def test_the_optimizer_s_share_falls_with_the_batch():
    # 20 / (80 k + 20) is below 7.5 % first at k = 4
    assert said("optimizer", record(phases=step(forward=30, backward=50, optimizer=20))) == (
        "20 % of the step is the optimizer's update of 1,863,690 parameters, the same for any batch; a batch "
        "of 512 would bring it to 6 %, but may need more samples to the target."
    )


@pytest.mark.parametrize(("share", "blamed"), [(14.9, False), (15.1, True)])
def test_the_trainer_s_own_work_is_blamed_from_15_per_cent_on(share: float, blamed: bool):
    run = record(phases=step(forward=30, backward=70 - share, other=share))
    assert (judged("overhead", run) is not None) is blamed


def test_overhead_says_how_short_the_step_is():
    assert said("overhead", record(phases=step(forward=1, backward=2, other=1))) == (
        "25 % of the 4 ms of a step is the trainer's own work, the same for any batch: steps with "
        "more samples have less of it."
    )


@pytest.mark.parametrize("rule", [name for name, _ in causes.RULES if name != "oversubscribed"])
def test_a_run_that_was_not_timed_is_not_blamed(rule: str):
    phases = step(forward=1, backward=1, communication=10, wait=10, data=10, optimizer=10, other=10)
    for strategy in ("allreduce", "pipeline"):
        run = gang(phases, timed=False, strategy=strategy)
        assert judged(rule, run, one_thread(10_000)) is None
