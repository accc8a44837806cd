/*
A database that loses its last commits: an asynchronous failover, or a restore. Offsets that Kafka has are ahead of it then;
the database's own record of them, the anchor, goes back with the rest, since it is one more commit.

The commits are numbered; a failover drops any number of the last ones. One partition of three messages, one member that is
killed at any step. The member also remembers which history of the database (timeline, server) its position belongs to: an
effect can be lost without the anchor going back. What is checked: at rest the database has every effect once, though
acknowledged messages were lost.

`point:` names the crash point of a step; tests compare these names with the source.
*/
#ifndef FAILOVERS
#define FAILOVERS 2
#endif
#ifndef CRASHES
#define CRASHES 2
#endif
#define MESSAGES 3
#define COMMITS_MAX 16

/* what each commit wrote: an effect (1 to MESSAGES), or an anchor (10 + its offset) */
byte commits[COMMITS_MAX];
byte length;
/* the database as it stands, computed from the commits */
byte effects[MESSAGES];
byte anchor, history;
#ifdef ANCHOR_ELSEWHERE
byte elsewhere;
#endif
/* Kafka's */
byte committed;
byte failovers = FAILOVERS, crashes = CRASHES;
bool die;

#ifdef POSITION_ONLY
#define GONE_BACK (anchor != known)
#else
#define GONE_BACK (anchor != known || history != age)
#endif

inline failover() {
  do
  :: length > 0 -> length--;
     if
     :: commits[length] < 10 -> effects[commits[length] - 1]--
     :: else
     fi;
      commits[length] = 0
  :: break
  od;
  history++; anchor = 0; at = 0;
  do
  :: at < length ->
     if
     :: commits[at] >= 10 -> anchor = commits[at] - 10
     :: else
     fi;
     at++
  :: else -> break
  od;
  at = 0
}

proctype member() {
  byte front, known, age;
alive:
  { goto start;
start:
    atomic { /* assigned: from the lower of what the broker and the database know */
#ifdef NO_ANCHOR
      front = committed; known = anchor; age = history
#else
#ifdef ANCHOR_ELSEWHERE
      front = (committed < elsewhere -> committed : elsewhere); known = anchor; age = history
#else
      front = (committed < anchor -> committed : anchor); known = anchor; age = history
#endif
#endif
    };
end_loop:
    do
#ifndef NO_LOOK
    :: atomic { GONE_BACK -> goto start } /* the database has gone back: so does the member */
#endif
    :: atomic { front < MESSAGES && length < COMMITS_MAX - 2 -> /* point: received */
         if
         :: effects[front] == 0 -> effects[front]++; commits[length] = front + 1; length++ /* point: after:commit */
         :: else /* point: after:classify */
         fi;
         assert(effects[front] == 1);
         front++ };
       atomic { /* point: after:anchor_advance */
         if
#ifdef NO_LOOK
         :: front > anchor && length < COMMITS_MAX -> anchor = front; commits[length] = 10 + front; length++; known = front
         :: front <= anchor
#else
         :: GONE_BACK -> goto start
         :: !GONE_BACK && front > anchor && length < COMMITS_MAX ->
              anchor = front; commits[length] = 10 + front; length++; known = front
         :: !GONE_BACK && front <= anchor
#endif
         fi
#ifdef ANCHOR_ELSEWHERE
         ; elsewhere = front
#endif
       };
       committed = front /* point: before:ack */
    od
  } unless {
    atomic { die -> die = false; front = 0; known = 0; age = 0 }
  };
  goto alive
}

active proctype nemesis() {
  byte at;
end:
  do
  :: atomic { failovers > 0 -> failovers--; failover() }
  :: atomic { crashes > 0 && !die -> crashes--; die = true }
  od
}

active proctype checker() {
  timeout -> assert(effects[0] == 1 && effects[1] == 1 && effects[2] == 1)
}

init { run member() }
