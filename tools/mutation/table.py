"""The mutants: where each function is before and after a refactoring, what tests an area, what is edited.

To follow a refactoring, append the new place to the lines of `FUNCTIONS` and the new tests to the lines of
`AREAS`: of each line, the first that exists in the tree at hand is used. If a function was rewritten so that
the same edit would change something else, give its mutant an `after` edit with the same meaning. If the code
is gone, name the function in `REMOVED`, with the reason. Nothing else in this folder names a path.
"""

from __future__ import annotations

from dataclasses import dataclass

from edits import (
    Edit,
    boolean,
    called,
    compare,
    constant,
    decide,
    drop,
    negate,
    only,
    operand,
    operator,
    receiver,
    side,
)  # fmt: skip

# Name in this table: places, each `module::qualified name`, the module below src/manyhands. Two functions may
# have become one (flat_layout.py has the arithmetic of Arena and Store): each area still tests it for itself.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    # ---- sample order
    "mix": ("data/order.py::mix",),
    "key": ("data/order.py::key",),
    "shuffle": ("data/order.py::shuffle",),
    "split": ("data/order.py::split",),
    "sizes": ("data/order.py::sizes",),
    "Order.batches": ("data/order.py::Order.batches",),
    "Order.piece": ("data/order.py::Order.piece",),
    "Order.samples": ("data/order.py::Order.samples",),
    "in_order": ("data/order.py::in_order",),
    "Share.of": ("data/order.py::Share.of", "data/order.py::BatchShare.of"),
    # ---- arena
    "Lane.sums": ("strategies/arena.py::Lane.sums", "strategies/data_parallel/arena.py::DtypeBucket.sums"),
    "_Sum.is_done": ("strategies/arena.py::_Sum.is_done", "strategies/data_parallel/arena.py::_Sum.is_done"),
    "_Plan.border": ("strategies/arena.py::_Plan.border", "strategies/flat_layout.py::slice_of"),
    "Arena.begin": ("strategies/arena.py::Arena.begin", "strategies/data_parallel/arena.py::Arena.begin"),
    "Arena.reduce": ("strategies/arena.py::Arena.reduce", "strategies/data_parallel/arena.py::Arena.reduce"),
    "Arena.leave_out": (
        "strategies/arena.py::Arena.leave_out",
        "strategies/data_parallel/arena.py::Arena.skip",
    ),
    "Arena.publish": (
        "strategies/arena.py::Arena.publish",
        "strategies/data_parallel/arena.py::Arena.publish",
    ),
    "Arena.spread": (
        "strategies/arena.py::Arena.spread",
        "strategies/data_parallel/arena.py::Arena.broadcast",
    ),
    "Arena.norms": ("strategies/arena.py::Arena.norms", "strategies/data_parallel/arena.py::Arena.norms"),
    "Arena.together": (
        "strategies/arena.py::Arena.together",
        "strategies/data_parallel/arena.py::Arena.gathered",
    ),
    "Arena.part": ("strategies/arena.py::Arena.part", "strategies/flat_layout.py::ParameterSlot.piece"),
    "Arena._room": ("strategies/arena.py::Arena._room", "strategies/data_parallel/arena.py::Arena._targets"),
    "Arena._move_in": (
        "strategies/arena.py::Arena._move_in",
        "strategies/data_parallel/arena.py::Arena._move_parameters",
    ),
    "Arena._slice": ("strategies/arena.py::Arena._slice", "strategies/data_parallel/arena.py::Arena._slice"),
    "Arena._within": (
        "strategies/arena.py::Arena._within",
        "strategies/flat_layout.py::ParameterSlot.within",
    ),
    "Arena._clear_untouched": (
        "strategies/arena.py::Arena._clear_untouched",
        "strategies/data_parallel/arena.py::Arena._clear_untouched",
    ),
    # ---- parameter server
    "Server._hear": (
        "strategies/server.py::Server._hear",
        "strategies/asynchronous/parameter_server.py::QueueServer._handle",
    ),
    "Server._hand_out": (
        "strategies/server.py::Server._hand_out",
        "strategies/asynchronous/parameter_server.py::QueueServer._lease_out",
    ),
    "Server._take_into_round": (
        "strategies/server.py::Server._take_into_round",
        "strategies/asynchronous/parameter_server.py::QueueServer._take_into_round",
    ),
    "Server._is_complete": (
        "strategies/server.py::Server._is_complete",
        "strategies/asynchronous/parameter_server.py::QueueServer._is_complete",
    ),
    "Server._close_round": (
        "strategies/server.py::Server._close_round",
        "strategies/asynchronous/parameter_server.py::QueueServer._close_round",
    ),
    "Server._serve_slice": (
        "strategies/server.py::Server._serve_slice",
        "strategies/asynchronous/parameter_server.py::SliceServer.serve",
    ),
    "Server._apply": (
        "strategies/server.py::Server._apply",
        "strategies/asynchronous/parameter_slice.py::ParameterSlice.apply",
    ),
    "Server.state": (
        "strategies/server.py::Server.state",
        "strategies/asynchronous/parameter_slice.py::ParameterSlice.whole_state",
    ),
    "Server.load_state": (
        "strategies/server.py::Server.load_state",
        "strategies/asynchronous/parameter_slice.py::ParameterSlice.load_state",
    ),
    "Client.claim": (
        "strategies/client.py::Client.claim",
        "strategies/asynchronous/parameter_client.py::Client.lease",
    ),
    "Client.step": (
        "strategies/client.py::Client.step",
        "strategies/asynchronous/parameter_client.py::Client.step",
    ),
    "Client._push": (
        "strategies/client.py::Client._push",
        "strategies/asynchronous/parameter_client.py::Client._push",
    ),
    "Client._pull": (
        "strategies/client.py::Client._pull",
        "strategies/asynchronous/parameter_client.py::Client._pull",
    ),
    "Client._go_on_alone": (
        "strategies/client.py::Client._go_on_alone",
        "strategies/asynchronous/parameter_client.py::Client._step_locally",
    ),
    "MemoryWindow.pull": (
        "strategies/window.py::MemoryWindow.pull",
        "strategies/asynchronous/server_channel.py::MemoryChannel.pull",
    ),
    "MemoryWindow.listen": (
        "strategies/window.py::MemoryWindow.listen",
        "strategies/asynchronous/server_channel.py::MemoryChannel.listen",
    ),
    "MemoryWindow.forget": (
        "strategies/window.py::MemoryWindow.forget",
        "strategies/asynchronous/server_channel.py::MemoryChannel.forget",
    ),
    "MemoryWindow.close": (
        "strategies/window.py::MemoryWindow.close",
        "strategies/asynchronous/server_channel.py::MemoryChannel.close",
    ),
    "MessageWindow._pushed_parts": (
        "strategies/window.py::MessageWindow._pushed_parts",
        "strategies/asynchronous/server_channel.py::MessageChannel._pushed_parts",
    ),
    "_pulled": ("strategies/window.py::_pulled", "strategies/asynchronous/server_channel.py::_pulled_bytes"),
    "Store.__init__": ("strategies/store.py::Store.__init__", "strategies/flat_layout.py::slice_of"),
    "Store.within": ("strategies/store.py::Store.within", "strategies/flat_layout.py::ParameterSlot.within"),
    "Store.take_buffers": (
        "strategies/store.py::Store.take_buffers",
        "strategies/asynchronous/parameter_store.py::ParameterStore.load_buffers",
    ),
    "Store.part": ("strategies/store.py::Store.part", "strategies/flat_layout.py::ParameterSlot.piece"),
    # ---- partition of a model into stages
    "balanced": ("strategies/cut.py::balanced", "strategies/pipeline/partition.py::balanced"),
    "balanced.cost": ("strategies/cut.py::balanced.cost", "strategies/pipeline/partition.py::balanced.cost"),
    "stages_of": ("strategies/cut.py::stages_of", "strategies/pipeline/partition.py::stages_of"),
    "described": ("strategies/cut.py::described", "strategies/pipeline/partition.py::describe"),
    # ---- schedule of a pipeline
    "gpipe": ("strategies/schedule.py::gpipe", "strategies/pipeline/schedule.py::gpipe"),
    "one_forward_one_backward": (
        "strategies/schedule.py::one_forward_one_backward",
        "strategies/pipeline/schedule.py::one_forward_one_backward",
    ),
    "in_flight": ("strategies/schedule.py::in_flight", "strategies/pipeline/schedule.py::in_flight"),
    "idle_share": ("strategies/schedule.py::idle_share", "strategies/pipeline/schedule.py::idle_share"),
    "ideal_speedup": (
        "strategies/schedule.py::ideal_speedup",
        "strategies/pipeline/schedule.py::ideal_speedup",
    ),
    "timeline": ("strategies/schedule.py::timeline",),
    "drawn": ("strategies/schedule.py::drawn",),
    "_cell": ("strategies/schedule.py::_cell",),
    # ---- checkpoints and going on
    "Checkpoints.save": ("checkpoint.py::Checkpoints.save", "engine/checkpoint/storage.py::Checkpoints.save"),
    "Checkpoints.paths": (
        "checkpoint.py::Checkpoints.paths",
        "engine/checkpoint/storage.py::Checkpoints.paths",
    ),
    "Checkpoints.latest": (
        "checkpoint.py::Checkpoints.latest",
        "engine/checkpoint/storage.py::Checkpoints.latest",
    ),
    "load": ("checkpoint.py::load", "engine/checkpoint/storage.py::load"),
    "separate": ("checkpoint.py::separate", "engine/checkpoint/storage.py::separate"),
    "restore_random_state": (
        "checkpoint.py::restore_random_state",
        "engine/checkpoint/storage.py::restore_random_state",
    ),
    "_checksum": ("checkpoint.py::_checksum", "engine/checkpoint/storage.py::_checksum"),
    "_numpy": ("checkpoint_state.py::_numpy", "engine/checkpoint/saved_state.py::_numpy"),
    "read": ("checkpoint_state.py::read", "engine/checkpoint/saved_state.py::read"),
    "check_generators": (
        "checkpoint_state.py::check_generators",
        "engine/checkpoint/saved_state.py::check_generators",
    ),
    "_check_position": (
        "checkpoint_state.py::_check_position",
        "engine/checkpoint/saved_state.py::_check_position",
    ),
    "_check_point": ("checkpoint_state.py::_check_point", "engine/checkpoint/saved_state.py::_check_point"),
    "choose": ("resume.py::choose", "engine/checkpoint/resume.py::choose"),
    "agree": ("resume.py::agree", "engine/checkpoint/resume.py::agree"),
    "restore_generators": (
        "resume.py::restore_generators",
        "engine/checkpoint/resume.py::restore_generators",
    ),
    "random_name": ("resume.py::random_name", "engine/checkpoint/resume.py::random_name"),
    "_checked": ("resume.py::_checked", "engine/checkpoint/resume.py::_checked"),
    # ---- watchdog
    "Patience.observe": (
        "launchers/patience.py::Patience.observe",
        "launchers/supervision/watchdog.py::Watchdog.observe",
    ),
    "Patience.correct": (
        "launchers/patience.py::Patience.correct",
        "launchers/supervision/watchdog.py::Watchdog.correct",
    ),
    "Patience.excuse": (
        "launchers/patience.py::Patience.excuse",
        "launchers/supervision/watchdog.py::Watchdog.discount",
    ),
    "Patience.forgive": (
        "launchers/patience.py::Patience.forgive",
        "launchers/supervision/watchdog.py::Watchdog.restart_timers",
    ),
    "Patience.deadline": (
        "launchers/patience.py::Patience.deadline",
        "launchers/supervision/watchdog.py::Watchdog.deadline",
    ),
    "Patience.is_over": (
        "launchers/patience.py::Patience.is_over",
        "launchers/supervision/watchdog.py::Watchdog.is_hung",
    ),
    "first_cause": ("launchers/verdict.py::first_cause", "launchers/supervision/diagnosis.py::first_cause"),
    "is_consequence": (
        "launchers/verdict.py::is_consequence",
        "launchers/supervision/diagnosis.py::is_consequence",
    ),
    "blame": ("launchers/verdict.py::blame", "launchers/supervision/diagnosis.py::blame"),
    "_standstill": ("launchers/verdict.py::_standstill", "launchers/supervision/diagnosis.py::_hangs"),
    "_others": ("launchers/verdict.py::_others", "launchers/supervision/diagnosis.py::_others"),
    "_workers": ("launchers/verdict.py::_workers", "launchers/supervision/diagnosis.py::_workers"),
    # ---- fit
    "Fit.steps": ("analysis/fit.py::Fit.steps",),
    "estimate": ("analysis/fit.py::estimate",),
    "_columns": ("analysis/fit.py::_columns",),
    "_model": ("analysis/fit.py::_model",),
    "_solve": ("analysis/fit.py::_solve",),
    "_room": ("analysis/fit.py::_room",),
    "_residuals": ("analysis/fit.py::_residuals",),
    "_slopes": ("analysis/fit.py::_slopes",),
    "_misfit": ("analysis/fit.py::_misfit",),
    "_interval": ("analysis/fit.py::_interval",),
    # ---- ledger
    "Ledger.changing": (
        "ledger.py::Ledger.changing",
        "strategies/asynchronous/work_queue.py::WorkQueue.changing",
    ),
    "Ledger.enter": ("ledger.py::Ledger.enter", "strategies/asynchronous/work_queue.py::WorkQueue.enter"),
    "Ledger.trained": (
        "ledger.py::Ledger.trained",
        "strategies/asynchronous/work_queue.py::WorkQueue.trained",
    ),
    "Ledger.is_full": (
        "ledger.py::Ledger.is_full",
        "strategies/asynchronous/work_queue.py::WorkQueue.is_full",
    ),
    "Ledger.halt": ("ledger.py::Ledger.halt", "strategies/asynchronous/work_queue.py::WorkQueue.halt"),
    "Ledger.test": ("ledger.py::Ledger.test", "strategies/asynchronous/work_queue.py::WorkQueue.test"),
    "Ledger.is_drained": (
        "ledger.py::Ledger.is_drained",
        "strategies/asynchronous/work_queue.py::WorkQueue.is_drained",
    ),
    "Ledger.put_back": (
        "ledger.py::Ledger.put_back",
        "strategies/asynchronous/work_queue.py::WorkQueue.put_back",
    ),
    "Ledger._next": ("ledger.py::Ledger._next", "strategies/asynchronous/work_queue.py::WorkQueue._next"),
    "Ledger._is_ahead": (
        "ledger.py::Ledger._is_ahead",
        "strategies/asynchronous/work_queue.py::WorkQueue._is_ahead",
    ),
    # ---- averaging
    "Replica.merge": (
        "strategies/outer.py::Replica.merge",
        "strategies/local_sgd/replica.py::Replica.average",
    ),
    "Replica.remember": (
        "strategies/outer.py::Replica.remember",
        "strategies/local_sgd/replica.py::Replica.adopt_optimizer_state",
    ),
    "Replica.agree": (
        "strategies/outer.py::Replica.agree",
        "strategies/local_sgd/replica.py::Replica.mark_synced",
    ),
    "Nesterov.meet": (
        "strategies/outer.py::Nesterov.meet",
        "strategies/local_sgd/outer.py::Nesterov.synchronize",
    ),
    "Elastic.__init__": (
        "strategies/outer.py::Elastic.__init__",
        "strategies/local_sgd/outer.py::Elastic.__init__",
    ),
    "Elastic.meet": (
        "strategies/outer.py::Elastic.meet",
        "strategies/local_sgd/outer.py::Elastic.synchronize",
    ),
    # ---- learning rate
    "Schedule.__call__": (
        "recipes/schedule.py::Schedule.__call__",
        "recipes/lr_schedule.py::Schedule.__call__",
    ),
    "Schedule._warm": ("recipes/schedule.py::Schedule._warm", "recipes/lr_schedule.py::Schedule._warm"),
    "Schedule._decayed": (
        "recipes/schedule.py::Schedule._decayed",
        "recipes/lr_schedule.py::Schedule._decayed",
    ),
}

# Functions that a refactoring has removed, and why. In a tree without them, their mutants are reported as
# dropped, not as errors.
REMOVED: dict[str, str] = {
    "timeline": "only tests used it: it is a helper in tests/strategies/test_schedule.py now",
    "drawn": "only tests used it: it is deleted",
    "_cell": "a part of drawn, which is deleted",
}

NEW = ""  # as the last alternative: the test is newer than some trees, which have nothing in its place
_RUNS = ("tests/test_free_runs.py", "tests/runs/test_async_runs.py")
_AGREE = "tests/faults/test_resume_agreement.py"


def _either(files: tuple[str, ...], *tests: str) -> tuple[str, ...]:
    """One line of `AREAS`: each of these tests in each of these files."""
    return tuple(f"{file}::{test}" for file in files for test in tests)


# Area: what tests it, in this order. Each line is one file or one test (`file::test`) with its alternatives.
# `file::test` means all parameters of the test. No test here starts mpirun, which would set PYTHONPATH anew.
AREAS: dict[str, tuple[tuple[str, ...], ...]] = {
    "order": (
        ("tests/data/test_order.py",),
        _either(
            ("tests/test_ledger.py", "tests/strategies/test_work_queue.py"),
            "test_pieces_are_the_parts_of_batches",
        ),
        _either(
            ("tests/parity/test_free.py", "tests/parity/test_asynchronous.py"),
            "test_several_servers_are_one",
        ),
    ),
    "arena": (
        ("tests/strategies/test_flat_layout.py", NEW),
        ("tests/parity/test_allreduce.py",),
        ("tests/strategies/test_traffic.py::test_a_sum_of_gradients_counts_the_same_on_every_transport",),
    ),
    "server": (
        ("tests/strategies/test_flat_layout.py", NEW),
        ("tests/parity/test_free.py", "tests/parity/test_asynchronous.py"),
        ("tests/strategies/test_scripted.py",),
        ("tests/strategies/test_rounds.py",),
        (
            "tests/strategies/test_traffic.py::test_a_push_and_a_pull_count_at_both_ends_in_memory_and_as_messages",
        ),
        _either(_RUNS, "test_two_workers_learn_it_all_the_same"),
        _either(_RUNS, "test_any_strategy_goes_on_from_anothers_checkpoint"),
        _either(_RUNS, "test_a_server_by_messages_of_torch"),
    ),
    "partition": (("tests/strategies/test_cut.py", "tests/strategies/test_partition.py"),),
    "schedule": (("tests/strategies/test_schedule.py",),),
    "checkpoint": (
        ("tests/test_checkpoint.py", "tests/engine/test_checkpoint.py"),
        ("tests/test_checkpoint_trust.py", "tests/engine/test_checkpoint_trust.py"),
        _either(
            (_AGREE,),
            "test_a_rank_that_got_something_else_is_named",
            "test_a_rank_that_received_something_else_is_named",
        ),
        _either(
            (_AGREE,),
            "test_a_rank_with_an_older_checkpoint_goes_on_from_rank_0s",
            "test_a_rank_with_an_older_checkpoint_resumes_from_rank_0s",
        ),
        _either(
            (_AGREE,),
            "test_where_rank_0_has_none_all_begin_at_zero",
            "test_if_rank_0_has_none_all_start_from_the_beginning",
        ),
        _either(
            (_AGREE,),
            "test_a_forged_checkpoint_is_passed_over_by_all",
            "test_a_forged_checkpoint_is_skipped_by_all",
        ),
    ),
    "watchdog": (
        ("tests/launchers/test_patience.py", "tests/launchers/test_watchdog.py"),
        ("tests/launchers/test_verdict.py", "tests/launchers/test_diagnosis.py"),
    ),
    "fit": (("tests/analysis/test_fit.py",), ("tests/analysis/test_regimes.py",)),
    "ledger": (
        ("tests/test_ledger.py", "tests/strategies/test_work_queue.py"),
        ("tests/strategies/test_scripted.py",),
    ),
    "average": (("tests/parity/test_average.py",), ("tests/strategies/test_average.py",)),
    "rate": (("tests/recipes/test_schedule.py", "tests/recipes/test_lr_schedule.py"),),
}


@dataclass(frozen=True)
class Mutant:
    """One edit of one function, and what it breaks, in a line."""

    area: str
    function: str  # a name of `FUNCTIONS`
    edit: Edit
    breaks: str
    after: Edit | None = None  # the same meaning, forevery place of the function but the first

    @property
    def name(self) -> str:
        """The name of the mutant, the same in every tree."""
        return f"{self.area}: {self.function}: {self.edit.text}"


MUTANTS = [
    Mutant("order", "mix", constant(30, 29), "another hash: other orders than before the upgrade"),
    Mutant("order", "key", only("mix", 0, 1), "numbers of a key are not mixed"),
    Mutant("order", "shuffle", only("key", 0), "every epoch has the same order"),
    Mutant("order", "split", constant(1, 2), "two parts are one"),
    Mutant("order", "sizes", operator("-", "+"), "more parts than there are"),
    Mutant("order", "Order.batches", compare("<", "<="), "an empty batch where the last one is full"),
    Mutant("order", "Order.batches", operator("+", "*", 2), "the first epoch forever"),
    Mutant("order", "Order.batches", constant(1, 2), "every second epoch is left out"),
    Mutant("order", "Order.piece", compare("<", "<="), "off by one where shorter pieces begin"),
    Mutant("order", "Order.piece", only("min", 0), "the ragged end is cut as a full batch"),
    Mutant("order", "Order.piece", side("+", "right", 7), "pieces of later epochs are of the first"),
    Mutant("order", "Order.samples", operator("+", "*"), "a piece has another length"),
    Mutant("order", "in_order", only("min", 0), "a test set is read beyond its end"),
    Mutant("order", "Share.of", decide(False), "a stage that must not read reads"),
    Mutant("arena", "Lane.sums", compare("!=", "=="), "sums its own row twice and no other"),
    Mutant("arena", "Lane.sums", side("//", "left"), "bytes are counted too often"),
    Mutant("arena", "_Sum.is_done", boolean("and", "or"), "rows of several workers are not summed"),
    Mutant("arena", "_Plan.border", side("*", "left"), "slices end too early"),
    Mutant("arena", "Arena.begin", drop("assign"), "gradients of the last step are added to"),
    Mutant("arena", "Arena.reduce", drop("call", 0), "a parameter without a gradient keeps the last one"),
    Mutant("arena", "Arena.reduce", drop("call", 1), "sums before the others have written (lost barrier)"),
    Mutant("arena", "Arena.reduce", compare("is not", "is"), "nothing travels between hosts"),
    Mutant("arena", "Arena.leave_out", drop("for", 0), "what had no gradient once never has one again"),
    Mutant("arena", "Arena.leave_out", drop("for", 1), "an unused parameter is updated"),
    Mutant("arena", "Arena.publish", constant(1, 2), "two workers go on before all slices are updated"),
    Mutant("arena", "Arena.spread", drop("if"), "hosts begin with parameters of their own"),
    Mutant("arena", "Arena.norms", receiver("sqrt_"), "a norm is its square"),
    Mutant("arena", "Arena.together", receiver("clone"), "the next kind of state overwrites this one"),
    Mutant("arena", "Arena.together", drop("call", 1), "rank 0 reads slices that are not there yet"),
    Mutant("arena", "Arena.part", operator("-", "+"), "a state is taken from the wrong place"),
    Mutant("arena", "Arena._room", negate(1), "a lone worker's sums do not travel"),
    Mutant("arena", "Arena._room", compare(">", "<"), "the sums of a host do not travel"),
    Mutant("arena", "Arena._move_in", compare("==", "!="), "not the first worker fills the memory"),
    Mutant("arena", "Arena._slice", operator("-", "+"), "another parameter's gradient"),
    Mutant("arena", "Arena._within", only("min", 0, 1), "a part reaches beyond its parameter"),
    Mutant("arena", "Arena._clear_untouched", negate(), "zeroes what was written, keeps what was not"),
    Mutant("server", "Server._hear", operator("-", "+"), "staleness is the sum of two versions"),
    Mutant("server", "Server._hear", drop("call", 3), "gradients that were held are lost at a sync point"),
    Mutant("server", "Server._hear", drop("call", 0), "waits forever for a hello that came"),
    Mutant("server", "Server._hand_out", operand("and", 1, 1), "flushes before every piece"),
    Mutant("server", "Server._hand_out", operand("and", 0, 1), "asks for a flush of nothing"),
    Mutant("server", "Server._hand_out", compare("!=", "=="), "fresh parameters are taken for old ones"),
    Mutant("server", "Server._take_into_round", compare("<", "<="), "no gradient comes in time for a round"),
    Mutant("server", "Server._is_complete", constant(1, 2), "a round never goes with one gradient"),
    Mutant("server", "Server._is_complete", operand("or", 0), "a round waits for gradients that cannot come"),
    Mutant("server", "Server._close_round", side("/", "left"), "the sum over samples, not the mean"),
    Mutant(
        "server", "Server._close_round", called("amax", "amin"), "what one worker did not use is left out"
    ),
    Mutant("server", "Server._close_round", drop("for", 1), "a round is its first gradient"),
    Mutant("server", "Server._close_round", compare("==", ">="), "each gradient of a round is an update"),
    Mutant("server", "Server._serve_slice", operator("-", "+"), "wrong staleness at the second server"),
    Mutant("server", "Server._apply", called("max", "min"), "a stale gradient counts in full"),
    Mutant("server", "Server._apply", side("/", "left"), "the learning rate is not divided by the staleness"),
    Mutant("server", "Server._apply", drop("add"), "versions never go up"),
    Mutant("server", "Server._apply", decide(True, 1), "unused parameters are updated"),
    Mutant("server", "Server._apply", called("add_", "copy_"), "buffers become their change"),
    Mutant(
        "server",
        "Server.state",
        constant(1, 2, 1),
        "a state has no optimizer state of the second server",
        after=drop("for", 1),  # there, both loops go over one range
    ),
    Mutant("server", "Server.state", drop("call", 1), "a state has the first buffers"),
    Mutant(
        "server", "Server.load_state", drop("call", 1), "buffers of a loaded model do not reach the workers"
    ),
    Mutant("server", "Server.load_state", drop("call", 2), "a loaded run has no momentum"),
    Mutant("server", "Client.claim", compare(">", ">="), "holds gradients when it has none"),
    Mutant("server", "Client.claim", drop("call", 1), "never pulls"),
    Mutant("server", "Client.step", side("/", "left"), "the weight is not a share"),
    Mutant("server", "Client.step", compare(">=", ">", 0), "pushes a step too late"),
    Mutant("server", "Client.step", compare(">=", ">", 1), "pulls a step too late"),
    Mutant("server", "Client.step", drop("call", 1), "does not clip", after=drop("call", 2)),
    Mutant("server", "Client._push", operator("-", "+"), "a buffer's change is a sum"),
    Mutant("server", "Client._push", drop("call", 1), "a buffer's change is pushed twice"),
    Mutant("server", "Client._push", drop("assign", 2), "holds forever what it has pushed"),
    Mutant("server", "Client._pull", drop("for", 1), "a pulled buffer counts as a change"),
    Mutant("server", "Client._go_on_alone", called("sub_", "add_"), "goes uphill between two pulls"),
    Mutant("server", "Client._go_on_alone", constant(1, 2), "sums begin with an old push"),
    Mutant(
        "server", "Client._go_on_alone", called("maximum", "minimum"), "forgets what an earlier step used"
    ),
    Mutant("server", "MemoryWindow.pull", compare("==", "!="), "buffers are not pulled"),
    Mutant("server", "MemoryWindow.listen", compare(">", "<", 2), "serves low ranks first (unfair)"),
    Mutant("server", "MemoryWindow.forget", drop("assign", 1), "who joins waits for an answer to the dead"),
    Mutant("server", "MemoryWindow.close", drop("assign"), "who joins too late waits forever"),
    Mutant("server", "MessageWindow._pushed_parts", compare("==", "!="), "buffers go to the wrong server"),
    Mutant("server", "_pulled", compare("==", "!="), "bytes of buffers are not counted"),
    Mutant("server", "Store.__init__", operator("*", "+", 1), "no server has the first parameters"),
    Mutant("server", "Store.within", called("max", "min", 1), "a part of a slice is always empty"),
    Mutant("server", "Store.take_buffers", negate(), "running means are rounded"),
    Mutant("server", "Store.part", operator("-", "+"), "optimizer state is taken from the wrong place"),
    Mutant("partition", "balanced.cost", constant(1, 0, 0), "sends the wrong block's outputs"),
    Mutant("partition", "balanced.cost", operator("-", "+", 1), "a stage takes the sum of two ends"),
    Mutant("partition", "balanced.cost", compare("<", "<="), "the last stage sends"),
    Mutant("partition", "balanced", called("max", "min"), "the slowest stage is the fastest"),
    Mutant("partition", "balanced", operator("+", "-", 5), "of equally good cuts the uneven one"),
    Mutant("partition", "balanced", operand("or", 1, 1), "cuts at forbidden borders"),
    Mutant("partition", "balanced", compare("<", ">", 1), "the worst cut"),
    Mutant("partition", "balanced", side("-", "left", 3), "one stage too many"),
    Mutant("partition", "balanced", compare("<", "<=", 2), "names a border that is none"),
    Mutant("partition", "stages_of", constant(1, 2), "outputs of the block before the last"),
    Mutant("partition", "described", compare("<", "<="), "the last stage sends"),
    Mutant("partition", "described", constant(1, 2, 1), "the last block of a stage is off by one"),
    Mutant("schedule", "gpipe", constant("backward", "forward"), "never backward"),
    Mutant("schedule", "one_forward_one_backward", constant(1, 0), "holds one micro-batch too many"),
    Mutant("schedule", "one_forward_one_backward", called("min", "max"), "more forwards than micro-batches"),
    Mutant("schedule", "one_forward_one_backward", side("+", "right"), "forwards begin again"),
    Mutant("schedule", "in_flight", called("max", "min"), "the least that is held"),
    Mutant("schedule", "in_flight", constant(1, 0, 1), "a backward lets go of nothing"),
    Mutant("schedule", "idle_share", operator("-", "+", 1), "idle for less"),
    Mutant("schedule", "ideal_speedup", side("*", "left"), "speedup without micro-batches"),
    Mutant("schedule", "timeline", compare("<=", "<"), "a forward of stage 1 does not wait for stage 0"),
    Mutant("schedule", "timeline", only("max", 0), "begins before its input is there"),
    Mutant("schedule", "timeline", negate(2), "forwards go the other way"),
    Mutant("schedule", "drawn", called("max", "min"), "a line ends too early"),
    Mutant("schedule", "_cell", operator("-", "+", 0), "no action has an end"),
    Mutant("checkpoint", "Checkpoints.save", drop("for"), "keeps all checkpoints"),
    Mutant("checkpoint", "Checkpoints.save", drop("call", 0), "a removed folder ends the run"),
    Mutant("checkpoint", "Checkpoints.paths", operand("and", 0), "a link is a checkpoint"),
    Mutant("checkpoint", "Checkpoints.latest", only("reversed", 0), "goes on from the oldest"),
    Mutant("checkpoint", "Checkpoints.latest", drop("call", 0), "what a killed writer left stays"),
    Mutant("checkpoint", "Checkpoints.latest", drop("raise"), "begins anew where all are damaged"),
    Mutant("checkpoint", "load", decide(False, 0), "another format is read"),
    Mutant("checkpoint", "load", decide(False, 1), "another run's checkpoint is read"),
    Mutant("checkpoint", "load", decide(False, 2), "damage is not noticed"),
    Mutant("checkpoint", "separate", decide(False), "tied tensors share memory"),
    Mutant("checkpoint", "restore_random_state", drop("call", 0), "torch's generator is not restored"),
    Mutant("checkpoint", "restore_random_state", drop("call", 2), "numpy's generator is not restored"),
    Mutant("checkpoint", "restore_random_state", drop("call", 3), "Python's generator is not restored"),
    Mutant("checkpoint", "_checksum", drop("assign", 1), "names are no part of the checksum"),
    Mutant("checkpoint", "_checksum", decide(False), "one number of an odd stride cannot be saved"),
    Mutant("checkpoint", "_numpy", compare("<=", "<", 1), "refuses a fresh generator"),
    Mutant("checkpoint", "_numpy", operand("or", 0), "of a state of numpy only the kind is looked at"),
    Mutant("checkpoint", "read", decide(False, 1), "a position beyond the run is believed"),
    Mutant("checkpoint", "check_generators", compare(">=", ">"), "a generator of one rank too many"),
    Mutant("checkpoint", "check_generators", drop("if", 4), "a rank without a generator"),
    Mutant("checkpoint", "_check_position", boolean("or", "and", 0), "steps without samples"),
    Mutant("checkpoint", "_check_position", drop("for"), "the curve is not looked at"),
    Mutant("checkpoint", "_check_point", compare("<=", "<", 1), "refuses an evaluation of the last step"),
    Mutant("checkpoint", "choose", operator("+", "-"), "refuses the last epoch"),
    Mutant("checkpoint", "agree", compare("!=", "=="), "complains about equal checkpoints"),
    Mutant("checkpoint", "agree", decide(False, 4), "two ranks with different checkpoints go on"),
    Mutant("checkpoint", "restore_generators", constant("random/", "random"), "a rank finds no generator"),
    Mutant("checkpoint", "random_name", compare("==", "!="), "rank 0 has another's generator"),
    Mutant("checkpoint", "_checked", drop("call", 0), "generators are not checked"),
    Mutant("checkpoint", "_checked", compare("==", "!=", 0), "an optimizer without state"),
    Mutant("watchdog", "Patience.observe", called("max", "min"), "learns the shortest pause"),
    Mutant("watchdog", "Patience.observe", compare(">", ">="), "a step counts before it was made"),
    Mutant(
        "watchdog", "Patience.observe", compare(">=", ">"), "the pause after the first step is not learned"
    ),
    Mutant("watchdog", "Patience.observe", compare("!=", "==", 1), "learns only from the start"),
    Mutant("watchdog", "Patience.observe", operand("and", 0, 1), "learns from the start of one that joins"),
    Mutant("watchdog", "Patience.observe", drop("assign", 4), "who moves is not seen to move"),
    Mutant("watchdog", "Patience.correct", decide(False), "a corrected status is not taken"),
    Mutant("watchdog", "Patience.excuse", drop("add", 0), "its own sleep is blamed on the others"),
    Mutant("watchdog", "Patience.excuse", drop("add", 1), "its own sleep is others' silence"),
    Mutant("watchdog", "Patience.forgive", drop("for"), "who waited for the dead is not forgiven"),
    Mutant("watchdog", "Patience.deadline", called("max", "min", 0), "a given timeout holds for the start"),
    Mutant("watchdog", "Patience.deadline", called("max", "min", 1), "the slack is no more than the least"),
    Mutant("watchdog", "Patience.deadline", only("min", 0), "waits forever"),
    Mutant("watchdog", "Patience.deadline", negate(3), "a disk has less time than a step"),
    Mutant("watchdog", "Patience.is_over", called("all", "any"), "who waits for a busy one hangs"),
    Mutant("watchdog", "Patience.is_over", operand("or", 0), "who was asked and waits is not believed"),
    Mutant("watchdog", "Patience.is_over", negate(2), "who waits is judged by its moves"),
    Mutant("watchdog", "first_cause", drop("if"), "not the lowest rank speaks"),
    Mutant("watchdog", "is_consequence", compare("==", "!="), "blames the one that noticed"),
    Mutant("watchdog", "blame", operator("/", "*"), "no worker stands still for long enough"),
    Mutant("watchdog", "blame", called("min", "max"), "blames the furthest ahead"),
    Mutant("watchdog", "blame", boolean("and", "or", 1), "who waits is blamed"),
    Mutant("watchdog", "_standstill", called("max", "min"), "silent for too short"),
    Mutant("watchdog", "_others", operand("and", 0), "speaks of the lost as if they were there"),
    Mutant("watchdog", "_workers", constant(3, 2), "three in a row are a range"),
    Mutant("fit", "Fit.steps", operator("/", "*"), "more steps with larger batches"),
    Mutant("fit", "estimate", called("maximum", "minimum"), "the smaller of two errors"),
    Mutant("fit", "estimate", side("+", "left"), "every draw is the curve itself"),
    Mutant("fit", "_columns", only("max", 1), "no least spread"),
    Mutant("fit", "_solve", operator("-", "+"), "B_crit is a product"),
    Mutant("fit", "_model", operator("+", "-"), "the curve that is drawn around is upside down"),
    Mutant("fit", "_room", operator("*", "/"), "B_crit is not sought far enough"),
    Mutant("fit", "_residuals", called("maximum", "minimum"), "a bound counts where it holds"),
    Mutant("fit", "_residuals", side("/", "left"), "points count alike, however sure they are"),
    Mutant("fit", "_slopes", compare("<=", ">="), "a bound has a slope where it is idle"),
    Mutant("fit", "_misfit", side("-", "left", 1), "the freedom of the fit is not counted"),
    Mutant("fit", "_misfit", side("/", "left"), "the sum of squares, not the mean"),
    Mutant("fit", "_interval", constant(0.025, 0.25), "an interval of half the draws"),
    Mutant("ledger", "Ledger.changing", drop("assign", 2), "the row of a killed worker is not undone"),
    Mutant("ledger", "Ledger.enter", drop("assign", 0), "who joins is behind"),
    Mutant("ledger", "Ledger.trained", drop("add", 4), "pace is not counted"),
    Mutant("ledger", "Ledger.trained", drop("add", 2), "samples are not counted"),
    Mutant("ledger", "Ledger.is_full", compare(">=", ">"), "the log is full one update too late"),
    Mutant("ledger", "Ledger.halt", called("min", "max"), "a halt is no sync point"),
    Mutant("ledger", "Ledger.test", drop("assign", 1), "scores of the last test are added to"),
    Mutant("ledger", "Ledger.is_drained", operand("or", 0), "drained while pieces are in flight"),
    Mutant("ledger", "Ledger.is_drained", compare(">=", ">", 0), "never drained"),
    Mutant("ledger", "Ledger.put_back", drop("add", 0), "a lost piece is never used"),
    Mutant("ledger", "Ledger._next", compare("<", "<=", 0), "a piece beyond the sync point"),
    Mutant("ledger", "Ledger._next", only("min", 1), "tests beyond the test set"),
    Mutant("ledger", "Ledger._is_ahead", compare(">", ">="), "a bound is one too tight"),
    Mutant("average", "Replica.merge", drop("call", 1), "the sum, not the mean"),
    Mutant("average", "Replica.merge", drop("call", 2), "momentum is summed"),
    Mutant("average", "Replica.merge", drop("call", 4), "buffers lose what all had"),
    Mutant("average", "Replica.remember", drop("call", 0), "old state of what was not used"),
    Mutant("average", "Replica.agree", drop("for", 0), "buffers count from the start"),
    Mutant("average", "Nesterov.meet", operator("*", "+"), "momentum is added to the rate"),
    Mutant("average", "Nesterov.meet", drop("call", 2), "the anchor stays"),
    Mutant("average", "Elastic.__init__", side("/", "left"), "all pull as one"),
    Mutant("average", "Elastic.meet", drop("call", 2), "workers are not pulled"),
    Mutant("average", "Elastic.meet", called("add_", "sub_", 0), "the center runs away"),
    Mutant("rate", "Schedule.__call__", only("min", 0), "the rate changes after the horizon"),
    Mutant("rate", "Schedule._warm", compare(">=", ">"), "divides by a warm-up of zero"),
    Mutant("rate", "Schedule._warm", operator("-", "+"), "warms up beyond the peak"),
    Mutant("rate", "Schedule._decayed", compare(">=", ">"), "a milestone counts one step late"),
    Mutant("rate", "Schedule._decayed", operator("-", "+", 1), "the cosine does not end at zero"),
]
