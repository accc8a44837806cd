/*
From the outbox of one App to the inbox of another: two rows of two transactions, which commit late, in any order, or not
at all; two relays that are killed at any step; leases that expire at any time; a broker that may lose what it has not
confirmed, and whose confirmation may be lost; a consumer that is killed before its acknowledgement; another App's relay on the
same database.

What is checked: what was committed has its effect at the other App, once; what was rolled back has none.

`point:` names the crash point of a step; tests compare these names with the source.
*/
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef LOST
#define LOST 1
#endif
#ifndef EXPIRIES
#define EXPIRIES 1
#endif
#define ROWS 2
#define RELAYS 2

mtype = { open, committed, undone };

mtype row[ROWS] = open;
bool sent[ROWS];
/* who has leased a row: a relay + 1 */
byte leased[ROWS];
/* the row + 1 that a relay is at; a lease without its relay ends for certain */
byte at_work[RELAYS];
/* copies of a row's message: sent and not confirmed, and confirmed */
byte copies[ROWS];
byte effects[ROWS];
#ifdef BEYOND_THE_LAST
byte last;
#endif
byte crashes = CRASHES, lost = LOST, expiries = EXPIRIES;
bool die[RELAYS];

active proctype transactions() {
  byte at;
  do
  :: atomic { row[0] == open -> if :: row[0] = committed :: row[0] = undone fi }
  :: atomic { row[1] == open -> if :: row[1] = committed :: row[1] = undone fi }
  :: row[0] != open && row[1] != open -> break
  od
}

#ifdef SEES_UNCOMMITTED
#define VISIBLE(n) (row[n] != undone)
#else
#define VISIBLE(n) (row[n] == committed)
#endif

#ifdef BEYOND_THE_LAST
#define DUE(n) (VISIBLE(n) && !sent[n] && leased[n] == 0 && n + 1 > last)
#else
#define DUE(n) (VISIBLE(n) && !sent[n] && leased[n] == 0)
#endif

proctype relay(byte me) {
  byte at;
alive:
  { goto end_look;
end_look:
    atomic { /* point: before:relay_lease */
      if
      :: DUE(0) -> at = 0
      :: DUE(1) -> at = 1
      fi;
      leased[at] = me + 1; at_work[me] = at + 1
#ifdef BEYOND_THE_LAST
      ; last = at + 1
#endif
    }; /* point: after:relay_lease */
#ifdef MARK_FIRST
    sent[at] = true;
#endif
    if
    :: copies[at] < 3 -> copies[at]++ /* published and confirmed */
#ifdef MARK_UNCONFIRMED
    :: atomic { lost > 0 -> lost-- } /* lost by the broker before it confirmed */
#else
    :: atomic { lost > 0 -> lost--; leased[at] = 0; at_work[me] = 0 } -> goto end_look
#endif
    :: atomic { lost > 0 && copies[at] < 3 -> lost--; copies[at]++; /* the confirmation is lost */
         if
         :: leased[at] == me + 1 -> leased[at] = 0
         :: else
         fi;
         at_work[me] = 0 } -> goto end_look
    :: copies[at] >= 3 -> skip
    fi;
    atomic { /* point: before:relay_sent */
      sent[at] = true;
      if
      :: leased[at] == me + 1 -> leased[at] = 0
      :: else
      fi;
      at_work[me] = 0 };
    goto end_look /* point: after:relay_sent */
  } unless {
    atomic { die[me] -> die[me] = false; at = 0; at_work[me] = 0 }
  };
  goto alive
}

#ifdef ROUTE_IGNORED
#define TAKEN_ELSEWHERE(n) DUE(n)
#else
#define TAKEN_ELSEWHERE(n) false
#endif

/* a second App on the same database: it has no route of these rows, and gives up what it takes all the same */
active proctype another_app() {
end:
  do
  :: atomic { TAKEN_ELSEWHERE(0) -> sent[0] = true } /* point: before:relay_lease */
  :: atomic { TAKEN_ELSEWHERE(1) -> sent[1] = true }
  od
}

active proctype consumer() {
  byte at;
end:
  do
  :: atomic {
       if
       :: copies[0] > 0 -> at = 0
       :: copies[1] > 0 -> at = 1
       fi };
     if
#ifdef NEW_ID
     :: effects[at] < 3 -> effects[at]++ /* another id each time it is published: no inbox knows it */
     :: else -> skip
#else
     :: atomic { effects[at] == 0 -> effects[at] = 1 } /* point: after:commit */
     :: effects[at] != 0 -> skip /* point: after:classify */
#endif
     fi;
     if
     :: copies[at]-- /* point: before:ack */
     :: atomic { crashes > 0 -> crashes-- } /* killed before the acknowledgement: the copy comes again */
     fi
  od
}

active proctype maintenance() {
end:
  do
  :: atomic { expiries > 0 && leased[0] != 0 -> expiries--; leased[0] = 0 }
  :: atomic { expiries > 0 && leased[1] != 0 -> expiries--; leased[1] = 0 }
  :: atomic { leased[0] != 0 && at_work[leased[0] - 1] != 1 -> leased[0] = 0 }
  :: atomic { leased[1] != 0 && at_work[leased[1] - 1] != 2 -> leased[1] = 0 }
  od
}

active proctype nemesis() {
end:
  do
  :: atomic { crashes > 0 && !die[0] -> crashes--; die[0] = true; }
  :: atomic { crashes > 0 && !die[1] -> crashes--; die[1] = true; }
  od
}

#define RIGHT(n) ((row[n] == committed && effects[n] == 1) || (row[n] == undone && effects[n] == 0))

active proctype checker() {
  timeout ->
  assert(leased[0] == 0 && leased[1] == 0);
  assert(RIGHT(0)); assert(RIGHT(1))
}

init { atomic { run relay(0); run relay(1) } }
