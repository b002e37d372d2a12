-- A run file of tapegrad: what one program did with memory.
--
-- Bytes and nanoseconds (since the recording began) are integers.  Seq numbers the events of a run: every allocation,
-- free, change of category, operation and mark takes the next one, and the bytes live at a seq are those that were live
-- right after that event.  NULL stands for "none" or "not known".

CREATE TABLE meta (  -- JSON: meta, peak, checks, sources; recording: while the program runs, or after it was killed
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
);

CREATE TABLE strings (
    id INTEGER PRIMARY KEY,
    text TEXT NOT NULL
);

CREATE TABLE categories (  -- what bytes serve as
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL
);

CREATE TABLE phases (  -- when a value was computed
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL
);

CREATE TABLE kinds (  -- of calls: a function of the program's, a layer, a checkpointed call, a tg.memory.scope block
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL
);

CREATE TABLE slot_kinds (  -- where the bytes of a slot of a captured program come from
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL
);

CREATE TABLE mark_kinds (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL
);

CREATE TABLE frames (  -- a piece of source text; column: in bytes of UTF-8
    id INTEGER PRIMARY KEY,
    file INTEGER REFERENCES strings,
    line INTEGER NOT NULL,
    function INTEGER REFERENCES strings,
    end_line INTEGER,
    "column" INTEGER,
    end_column INTEGER
);

CREATE TABLE stacks (  -- source location of a value: the innermost frame, and the stack that called it
    id INTEGER PRIMARY KEY,
    frame INTEGER NOT NULL REFERENCES frames,
    parent INTEGER REFERENCES stacks CHECK (parent < id)
);

CREATE TABLE steps (  -- training steps, up to and with the event end_seq
    id INTEGER PRIMARY KEY,
    begin_seq INTEGER NOT NULL,
    end_seq INTEGER NOT NULL,
    begin_ns INTEGER NOT NULL CHECK (begin_ns >= 0),
    end_ns INTEGER NOT NULL,
    cpu_ns INTEGER NOT NULL,
    peak_bytes INTEGER NOT NULL,
    peak_seq INTEGER NOT NULL,
    reruns INTEGER NOT NULL,
    restored INTEGER NOT NULL,
    evictions INTEGER NOT NULL,
    offloads INTEGER NOT NULL
);

CREATE TABLE boundaries (  -- ends of steps, as the program reported them: the steps follow from those of the highest kind
    id INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL CHECK (seq >= 0),
    ns INTEGER NOT NULL CHECK (ns >= 0),
    kind INTEGER NOT NULL,
    cpu_ns INTEGER NOT NULL,
    reruns INTEGER NOT NULL,
    restored INTEGER NOT NULL,
    evictions INTEGER NOT NULL,
    offloads INTEGER NOT NULL,
    peak_bytes INTEGER NOT NULL
);

CREATE TABLE calls (  -- calls during which operations ran
    id INTEGER PRIMARY KEY,
    kind INTEGER NOT NULL REFERENCES kinds,
    name INTEGER REFERENCES strings,
    file INTEGER REFERENCES strings,
    line INTEGER NOT NULL,  -- of the definition
    parent INTEGER REFERENCES calls CHECK (parent < id),
    step INTEGER REFERENCES steps,
    ordinal INTEGER NOT NULL,  -- among calls of one kind, name, file and line in a step and phase
    phase INTEGER NOT NULL REFERENCES phases,
    begin_seq INTEGER NOT NULL,
    begin_ns INTEGER NOT NULL CHECK (begin_ns >= 0),
    end_seq INTEGER NOT NULL,
    end_ns INTEGER NOT NULL,
    first INTEGER REFERENCES calls,  -- the call that a rerun repeats
    site INTEGER REFERENCES stacks  -- the program's line that makes the call
);

CREATE TABLE allocs (  -- bytes of one value
    id INTEGER PRIMARY KEY,
    begin_seq INTEGER NOT NULL CHECK (begin_seq >= 0),
    begin_ns INTEGER NOT NULL CHECK (begin_ns >= 0),
    bytes INTEGER NOT NULL CHECK (bytes BETWEEN 0 AND 1 << 50),  -- as the pool counts them, in units of 512
    requested INTEGER NOT NULL CHECK (requested BETWEEN 0 AND 1 << 50),  -- of the array
    category INTEGER NOT NULL REFERENCES categories,  -- at the beginning, see changes
    op INTEGER REFERENCES strings,
    phase INTEGER NOT NULL REFERENCES phases,
    stack INTEGER REFERENCES stacks,
    call INTEGER REFERENCES calls,
    shape INTEGER REFERENCES strings,
    dtype INTEGER REFERENCES strings,
    step INTEGER REFERENCES steps,
    remat_of INTEGER REFERENCES allocs CHECK (remat_of < id),  -- the allocation that held the same value before
    device INTEGER REFERENCES strings,
    end_seq INTEGER,  -- NULL: live at the end of the run
    end_ns INTEGER,
    holder INTEGER REFERENCES strings,  -- what kept the value alive longest
    last_forward_seq INTEGER,  -- the last operation of the forward pass that read it
    next_backward_seq INTEGER,  -- and the first of the backward pass after that
    source INTEGER REFERENCES ops,  -- the operation whose value it holds, if it is of the same step
    CHECK ((end_seq IS NULL) = (end_ns IS NULL) AND (end_seq IS NULL OR end_seq > begin_seq AND end_ns >= begin_ns))
);

CREATE TABLE changes (  -- an allocation has another category from here on
    id INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL,
    alloc INTEGER NOT NULL REFERENCES allocs,
    category INTEGER NOT NULL REFERENCES categories
);

CREATE TABLE ops (  -- an operation was applied (a lazy one is computed later, with others); optimizers' are left out
    id INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL CHECK (seq >= 0),
    ns INTEGER NOT NULL CHECK (ns >= 0),
    name INTEGER REFERENCES strings,
    phase INTEGER NOT NULL REFERENCES phases,
    call INTEGER REFERENCES calls,
    stack INTEGER REFERENCES stacks,
    bytes INTEGER NOT NULL CHECK (bytes BETWEEN 0 AND 1 << 50),  -- that its result takes, if it is allocated
    cost INTEGER NOT NULL CHECK (cost BETWEEN 0 AND 1 << 60),  -- in bytes moved, an estimate from shapes (costs.py)
    derivative_of INTEGER REFERENCES ops  -- in the backward pass: the operation of this step that it differentiates
);

CREATE TABLE reads (  -- an operation of the forward or backward pass reads the result of another one of its step
    id INTEGER PRIMARY KEY,
    op INTEGER NOT NULL REFERENCES ops,
    input INTEGER NOT NULL REFERENCES ops
);

CREATE TABLE programs (  -- a captured program (tg.function) that was replayed, or planned (then bytes is 0)
    id INTEGER PRIMARY KEY,
    name INTEGER REFERENCES strings,
    plain INTEGER REFERENCES programs CHECK (plain < id),  -- the program without a budget (NULL: itself)
    bytes INTEGER NOT NULL CHECK (bytes >= 0),  -- of its arena
    alignment INTEGER NOT NULL,  -- of the arena's offsets
    device INTEGER REFERENCES strings
);

CREATE TABLE tasks (  -- the tasks of a captured program, in order
    id INTEGER PRIMARY KEY,
    program INTEGER NOT NULL REFERENCES programs,
    op INTEGER REFERENCES strings,
    again INTEGER NOT NULL,  -- 1: a recomputation
    phase INTEGER NOT NULL REFERENCES phases,
    cost INTEGER NOT NULL CHECK (cost >= 0),  -- in twentieths of a byte moved
    file INTEGER REFERENCES strings,
    line INTEGER NOT NULL,
    rules INTEGER NOT NULL  -- 1: outputs may overwrite inputs; 2: done though nobody reads it; 4: done once (sums)
);

CREATE TABLE slots (  -- the allocations of a captured program
    id INTEGER PRIMARY KEY,
    program INTEGER NOT NULL REFERENCES programs,
    bytes INTEGER NOT NULL CHECK (bytes >= 0),
    kind INTEGER NOT NULL REFERENCES slot_kinds,
    category INTEGER NOT NULL REFERENCES categories,
    begin INTEGER NOT NULL,  -- allocated from this task of the program
    "end" INTEGER NOT NULL,  -- to before that one
    maker INTEGER REFERENCES tasks,  -- the task that writes it first
    outside INTEGER NOT NULL  -- 1: in memory of its own, not in the arena
);

CREATE TABLE uses (  -- tasks read (how: 0) and write (1) slots, use them as workspace (2), or a call returns them (3)
    id INTEGER PRIMARY KEY,
    task INTEGER REFERENCES tasks,
    slot INTEGER NOT NULL REFERENCES slots,
    how INTEGER NOT NULL,
    view INTEGER  -- parts of slots with equal layouts have the same
);

CREATE TABLE replays (  -- a replay of a captured program has ended
    id INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL CHECK (seq >= 0),
    ns INTEGER NOT NULL CHECK (ns >= 0),
    program INTEGER NOT NULL REFERENCES programs,
    alloc INTEGER REFERENCES allocs,  -- of the arena
    step INTEGER REFERENCES steps
);

CREATE TABLE marks (  -- the end of a step, the failure of an allocation, a note of the user's
    id INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL CHECK (seq >= 0),
    ns INTEGER NOT NULL CHECK (ns >= 0),
    kind INTEGER NOT NULL REFERENCES mark_kinds,
    text INTEGER REFERENCES strings
);

CREATE TABLE samples (  -- of the pool: bytes in use and reserved, and bytes in use that tapegrad did not allocate
    id INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL,
    used_bytes INTEGER NOT NULL,
    reserved_bytes INTEGER NOT NULL,
    outside_bytes INTEGER NOT NULL
);

CREATE TABLE walks (  -- an outermost backward pass
    id INTEGER PRIMARY KEY,
    rank INTEGER NOT NULL CHECK (rank >= 0),
    begin_ns INTEGER NOT NULL CHECK (begin_ns >= 0),
    end_ns INTEGER NOT NULL CHECK (end_ns >= begin_ns)
);

CREATE TABLE communication (  -- a rank took part in a collective, or in a message between two
    id INTEGER PRIMARY KEY,
    rank INTEGER NOT NULL CHECK (rank >= 0),
    "group" INTEGER REFERENCES strings,
    ranks INTEGER NOT NULL CHECK (ranks >= 0),
    number INTEGER NOT NULL,  -- rows of equal group and number are one collective
    kind INTEGER REFERENCES strings,
    detail INTEGER REFERENCES strings,
    bytes INTEGER NOT NULL CHECK (bytes >= 0),  -- of this rank's part
    file INTEGER REFERENCES strings,
    line INTEGER NOT NULL,
    entered_ns INTEGER NOT NULL CHECK (entered_ns >= 0),
    begun_ns INTEGER,
    done_ns INTEGER CHECK (done_ns >= entered_ns),
    needed_ns INTEGER,  -- when the program last began to wait for it
    waited_ns INTEGER NOT NULL CHECK (waited_ns >= 0),
    under_way INTEGER NOT NULL CHECK (under_way IN (0, 1)),  -- 1: the program went on while bytes moved
    walk INTEGER REFERENCES walks
);

CREATE TABLE ranks (  -- each rank of a job of several (none of a program alone)
    id INTEGER PRIMARY KEY,
    rank INTEGER NOT NULL CHECK (rank >= 0),
    peak_bytes INTEGER NOT NULL CHECK (peak_bytes >= 0),
    begin_ns INTEGER NOT NULL CHECK (begin_ns >= 0),
    end_ns INTEGER NOT NULL CHECK (end_ns >= begin_ns),
    sent_bytes INTEGER NOT NULL CHECK (sent_bytes >= 0)
);

CREATE TABLE gradients (  -- digests of gradients, if asked for
    id INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL,
    step INTEGER REFERENCES steps,
    name INTEGER REFERENCES strings,
    digest INTEGER REFERENCES strings
);
