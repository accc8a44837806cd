/*
The committed offset of one Kafka partition: messages settle out of order, the partition moves between two members, members
are killed, and one that has lost the partition goes on with what it had received.

Each member commits the front: the lowest offset that is not settled. A message is settled once its row is finished or parked
with its payload; one whose COMMIT is in doubt is not. What is checked: at rest every message has its effect, once.

`point:` names the crash point of a step; tests compare these names with the source.
*/
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef REBALANCES
#define REBALANCES 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef DOUBTS
#define DOUBTS 1
#endif
#ifndef FAILURES
#define FAILURES 1
#endif
#define MEMBERS 2

/* the broker: the offset to go on from, who has the partition, since which generation */
byte committed, owner, generation = 1;
/* the database, one bit a message */
byte effect, parked;
/* budgets */
byte rebalances = REBALANCES, crashes = CRASHES, doubts = DOUBTS, failures = FAILURES;
bool die[MEMBERS];

#define HAS(set, n) (((set) >> (n)) & 1)
#define ALL ((1 << MESSAGES) - 1)

inline offset_committed() {
  if
  :: since == generation -> committed = front
  :: else /* the broker refuses what a former generation commits */
  fi
}

proctype member(byte me) {
  byte since, base, next, settled, at, front;
alive:
  { goto end_loop;
end_loop:
    do
    :: atomic { owner == me && since != generation -> /* assigned: what was known of the partition is forgotten */
         since = generation; base = committed; next = committed; settled = 0 }
    :: atomic { owner != me && since != generation && since != 0 ->
#ifdef POSITION_ON_REVOCATION
         committed = next;
#endif
         since = 0 } /* lost, noticed late; what it had received goes on below */
    :: atomic { owner == me && since == generation && next < MESSAGES -> /* point: received */
         next++
#ifdef ON_RECEIPT
         ; front = next; offset_committed()
#endif
       }
    :: atomic { /* any message in flight, in any order */
         base < next && settled != ALL ->
         if
         :: base <= 0 && 0 < next && !HAS(settled, 0) -> at = 0
         :: base <= 1 && 1 < next && !HAS(settled, 1) -> at = 1
         :: base <= 2 && 2 < next && !HAS(settled, 2) -> at = 2
         :: else -> goto end_loop
         fi };
       if
       :: atomic { true -> /* point: after:commit */
            assert(!(HAS(effect, at) && HAS(parked, at)));
            if
            :: !HAS(parked, at) -> effect = effect | (1 << at)
            :: else
            fi;
            settled = settled | (1 << at) }
       :: atomic { failures > 0 && !HAS(effect, at) -> /* point: after:record_insert */
            failures--; parked = parked | (1 << at); settled = settled | (1 << at) }
       :: atomic { doubts > 0 && !HAS(effect, at) && !HAS(parked, at) -> /* point: during:commit */
            doubts--
#ifdef DOUBT_IS_DONE
            ; settled = settled | (1 << at)
#endif
          }
       fi
    :: atomic { since != 0 && base < next && settled != 0 -> /* point: before:ack */
         front = base;
         do
         :: front < next && HAS(settled, front) -> front++
         :: else -> break
         od;
#ifdef HIGHEST
         front = next;
         do
         :: front > base && !HAS(settled, front - 1) -> front--
         :: else -> break
         od;
#endif
         if
         :: front != committed -> offset_committed()
         :: else -> goto end_loop
         fi }
    od
  } unless {
    atomic {
      die[me] -> die[me] = false; since = 0; base = 0; next = 0; settled = 0; at = 0; front = 0;
      if
      :: owner == me -> owner = 1 - me; generation++
      :: else
      fi
    }
  };
  goto alive
}

active proctype table() {
end:
  do
  :: atomic { parked & 1 -> parked = parked & ~1; assert(!HAS(effect, 0)); effect = effect | 1 } /* point: after:claim_leased */
  :: atomic { parked & 2 -> parked = parked & ~2; assert(!HAS(effect, 1)); effect = effect | 2 }
  :: atomic { parked & 4 -> parked = parked & ~4; assert(!HAS(effect, 2)); effect = effect | 4 }
  od
}

active proctype nemesis() {
end:
  do
  :: atomic { rebalances > 0 -> rebalances--; owner = 1 - owner; generation++ }
  :: atomic { crashes > 0 && !die[0] -> crashes--; die[0] = true }
  :: atomic { crashes > 0 && !die[1] -> crashes--; die[1] = true }
  od
}

active proctype checker() {
  timeout -> assert(effect == ALL && parked == 0 && committed == MESSAGES)
}

init { atomic { run member(0); run member(1) } }
