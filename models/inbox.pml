/*
One message id through the inbox: delivered inline, parked after a failure, run again from the table under a lease.

Workers are killed between any two steps and start again; sessions are ended by the server; a COMMIT is lost, or takes
effect although its answer is lost, at any later time; a lease may expire at any time, whatever clocks say; handlers raise,
swallow a database error, or commit by themselves. What is checked: no effect twice, nothing lost, `processed` if and only
if there is the whole effect, `dead` if and only if there is none and exactly one dead letter.

Not in here: several ids, batches, the bound on starts, order. See relay.pml, kafka.pml and failover.pml for the rest.
`point:` names the crash point of a step; tests compare these names with the source.
*/
#ifndef COPIES
#define COPIES 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef LOST
#define LOST 1
#endif
#ifndef EXPIRIES
#define EXPIRIES 1
#endif
#define WORKERS 2
#define MISBEHAVIOURS 2
#define ATTEMPTS_MAX 2
#define NOBODY 0
#define ORPHAN 9 /* a session whose worker is gone, with its COMMIT on the way */

mtype = { none, processed, failed, leased, dead };

/* the broker */
byte queue = COPIES;
byte held[WORKERS];
/* what is committed */
mtype status = none;
byte attempts, effects, halves, letters, token, tokens;
bool pruned;
/* the row's lock: NOBODY, a worker + 1, or ORPHAN */
byte holder;
/* budgets */
byte crashes = CRASHES, kills = KILLS, lost = LOST, expiries = EXPIRIES, misbehaviours = MISBEHAVIOURS;
/* a worker's process and its session */
bool die[WORKERS], ended[WORKERS], aborted[WORKERS], closed[WORKERS];
byte lease[WORKERS];

#define SAFE assert(effects + halves <= 1)

inline applied() {
  status = processed; effects++; holder = NOBODY; SAFE
}

inline given_up_or_parked() {
  attempts++;
  if
  :: attempts >= ATTEMPTS_MAX -> status = dead;
#ifndef LETTER_AFTER_ACK
     letters++
#endif
  :: else -> status = failed
  fi
}

inline rolled_back(me) {
  if
  :: holder == me + 1 -> holder = NOBODY
  :: else
  fi;
  closed[me] = false; aborted[me] = false; ended[me] = false
}

proctype worker(byte me) {
  byte letter;
alive:
  { goto end_idle;
end_idle:
    if
    :: atomic { queue > 0 -> queue--; held[me] = 1 } -> goto claim /* point: received */
    :: atomic { status == failed && holder == NOBODY -> /* point: after:lease */
         tokens++; token = tokens; lease[me] = tokens; status = leased } -> goto claim_leased
    fi;

claim: /* point: before:begin */
#ifdef CHECK_THEN_ACT
    if
    :: status == none -> skip
    :: status != none -> goto ack
    fi;
    atomic { holder = me + 1; closed[me] = false };
#else
    atomic { /* point: after:claim */
      if
      :: status == none && holder == NOBODY -> holder = me + 1
      :: status != none -> goto ack /* point: after:classify */
      fi
    };
#endif
#ifdef ACK_FIRST
    held[me] = 0;
#endif
    goto handler;

claim_leased:
    atomic { /* point: after:claim_leased */
      if
#ifdef NO_FENCE
      :: holder == NOBODY -> holder = me + 1
#else
      :: holder == NOBODY && status == leased && token == lease[me] -> holder = me + 1
      :: holder == NOBODY && !(status == leased && token == lease[me]) -> lease[me] = 0; goto end_idle
#endif
      fi
    };

handler: /* point: between:writes */
    if
    :: skip
    :: atomic { misbehaviours > 0 -> misbehaviours--; rolled_back(me) } -> goto record /* raises */
    :: atomic { misbehaviours > 0 && holder == me + 1 -> misbehaviours--; holder = NOBODY; aborted[me] = true } /* swallows */
    :: atomic { misbehaviours > 0 && holder == me + 1 -> misbehaviours--; /* commits by itself */
#ifdef NO_GUARD
         status = processed; halves++; holder = NOBODY; SAFE; aborted[me] = true
#else
         holder = NOBODY; aborted[me] = true /* refused, and with it the transaction */
#endif
       }
    fi;

    atomic { /* point: after:handler */
      if
      :: ended[me] -> rolled_back(me); goto again
#ifndef NO_CLOSE
      :: !ended[me] && aborted[me] -> rolled_back(me); goto record
#endif
      :: else -> closed[me] = true /* point: before:close */
      fi
    };

    if /* point: before:commit */
    :: atomic { !ended[me] && holder == me + 1 -> applied(); closed[me] = false } -> goto ack /* point: after:commit */
    :: atomic { !ended[me] && aborted[me] -> rolled_back(me) } -> goto ack /* ROLLBACK answers COMMIT, and raises nothing */
    :: atomic { !ended[me] && lost > 0 && holder == me + 1 -> lost--; holder = ORPHAN; closed[me] = false } /* point: during:commit */
    :: atomic { ended[me] -> rolled_back(me) }
#ifdef CHECK_THEN_ACT
    :: atomic { !ended[me] && !aborted[me] && holder != me + 1 -> status = processed; effects++; SAFE; closed[me] = false } -> goto ack
#endif
    fi;
#ifdef ACK_AMBIGUOUS
    goto ack;
#endif
    if
    :: lease[me] == 0 -> goto claim /* an INSERT decides */
    :: else -> goto release
    fi;

again:
    if
    :: lease[me] == 0 -> goto claim
    :: else -> goto claim_leased
    fi;

release:
    atomic { /* point: after:release */
#ifdef RELEASE_WITHOUT_FENCE
      holder == NOBODY -> status = failed; lease[me] = 0
#else
      holder == NOBODY ->
      if
      :: status == leased && token == lease[me] -> status = failed
      :: else
      fi;
      lease[me] = 0
#endif
    };
    goto end_idle;

record:
    atomic { /* point: after:record_insert */ /* point: after:record_update */
      holder == NOBODY ->
      if
#ifdef UNCONDITIONAL_FAILURE
      :: true -> given_up_or_parked()
#else
      :: lease[me] == 0 && status == none -> given_up_or_parked()
      :: lease[me] != 0 && status == leased && token == lease[me] -> given_up_or_parked()
      :: else /* another's row: it decides */
#endif
      fi
#ifdef LETTER_AFTER_ACK
      ; letter = (status == dead)
#endif
    };
    /* point: after:commit */

ack:
    atomic { /* point: before:ack */
      held[me] = 0; lease[me] = 0 };
#ifdef LETTER_AFTER_ACK
    atomic { letters = letters + letter; letter = 0 };
#endif
    goto end_idle /* point: after:ack */
  } unless {
    atomic {
      die[me] -> die[me] = false;
      queue = queue + held[me]; held[me] = 0; lease[me] = 0; letter = 0;
      if
      :: closed[me] && holder == me + 1 -> holder = ORPHAN /* COMMIT had been sent */
      :: true -> rolled_back(me)
      fi;
      closed[me] = false; aborted[me] = false; ended[me] = false
    }
  };
  goto alive
}

active proctype server() {
end:
  do
  :: atomic { holder == ORPHAN -> applied() }
  :: atomic { holder == ORPHAN -> holder = NOBODY }
  od
}

active proctype maintenance() {
end:
  do
  /* point: after:rescue */
  :: atomic { status == leased && holder == NOBODY && expiries > 0 -> expiries--; status = failed }
  :: atomic { status == leased && holder == NOBODY && lease[0] != token && lease[1] != token -> status = failed }
  /* point: after:prune */
#ifdef RETENTION
  :: atomic { status == processed && holder == NOBODY && !pruned -> status = none; pruned = true }
#else
  :: atomic { status == processed && holder == NOBODY && !pruned && queue == 0 && held[0] == 0 && held[1] == 0 ->
       assert(effects == 1 && halves == 0); status = none; pruned = true }
#endif
  od
}

active proctype nemesis() {
end:
  do
  :: atomic { crashes > 0 && !die[0] -> crashes--; die[0] = true }
  :: atomic { crashes > 0 && !die[1] -> crashes--; die[1] = true }
  :: atomic { kills > 0 && holder == 1 -> kills--; holder = NOBODY; ended[0] = true }
  :: atomic { kills > 0 && holder == 2 -> kills--; holder = NOBODY; ended[1] = true }
  od
}

active proctype checker() {
  timeout ->
  assert(queue == 0 && held[0] == 0 && held[1] == 0);
  assert(holder == NOBODY);
  assert(status == processed || status == dead || pruned);
  assert(status != processed || (effects == 1 && halves == 0));
  assert(status != dead || (effects == 0 && halves == 0 && letters == 1))
}

init { atomic { run worker(0); run worker(1) } }
