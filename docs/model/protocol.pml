/*
 * The protocol of docs/protocol.md, for spin. Run it with check.sh, which also says what every switch should lead to.
 *
 * One process per rank: its engine and its training thread. The training thread either computes, while the engine
 * looks for failures, or waits for the engine, so the two are written one after the other. Names are those of the
 * Python code (engine.py, repair.py, session.py, ledger.py).
 *
 *   R  replicas         S  ranks in a replica (1 or 2)     G  microbatches
 *   IT iterations       NB buckets in a round              F  failures, at any step of any rank
 */
#ifndef R
#define R 3
#endif
#ifndef S
#define S 1
#endif
#ifndef G
#define G 4
#endif
#ifndef IT
#define IT 2
#endif
#ifndef NB
#define NB 1
#endif
#ifndef F
#define F 2
#endif

#define N           (R*S)
#define BIT(i)      (1<<(i))
#define FULL        (BIT(G)-1)
#define REPLICA(i)  ((i)/S)
#define COORD(i)    ((i)%S)
#define RANKS_OF(r) ((BIT(S)-1)<<((r)*S))
#define MATE(i)     (((i)/2)*2+1-(i)%2)

#define AGREE        1  /* an agreement of engine._attempt or engine._join_repair */
#define SHRINK       2
#define REPAIR_AGREE 3  /* the agreement at the end of a repair's pass */

#define OK       1      /* the bits of an agreement */
#define RUNNING  2
#define FAILED   128    /* result of a uniform call that raised, on all alike */

/* ---- the world outside: who is dead, and what MPI holds ------------------------------------------------------- */

byte dead;              /* ranks that are dead, whoever knows it */
byte failures;

/* Uniform calls (agree, shrink) of one communicator come one after another, so two slots are enough: a rank can be
 * in the next call while another one has not read the result of this one. 0: world, 1+c: cross-replica group c. */
typedef Call { byte what, gen, mem, in, bits, result; bool decided };
Call call[2*(1+S)];

byte revoked_world;     /* generations below this are revoked */
byte revoked_cross[S];

/* Plain collectives (barrier, all-reduce, all-gather) on the cross-replica group of the current epoch. */
byte ops[N];            /* how many this rank has entered */
byte tag[N];            /* iteration and round for which it entered the last one */
byte have[N];           /* microbatches in the local gradient; read by peers in an all-reduce */
byte twice[N];          /* those of them that are in it more than once */

byte at[N];             /* steps inside the replica (its own NCCL/Gloo collectives), modulo 4 */

/* ---- what is checked ------------------------------------------------------------------------------------------ */

typedef Decision { byte n, epoch, alive; bool ok };
Decision decision[2];   /* the n-th agreement as the training sides saw it: slot n%2 */
typedef Commit { byte it, epoch; byte ids[R] };
Commit commits[2];      /* slot it%2 */
byte working, saved;    /* ranks that are in the leader's work, and that have done it */

byte h, k, m, x;        /* scratch inside atomic steps, zero between them */
#define CLEAR h = 0; k = 0; m = 0; x = 0

/* ---- MPI ------------------------------------------------------------------------------------------------------ */

/* Enter a uniform call. The assertion: all ranks that are in it are in the same call on the same communicator. */
inline enter(f, slot, kind, generation, members, value) {
    x = 2*(f) + slot;
    if
    :: call[x].in == 0 ->
        call[x].what = kind; call[x].gen = generation; call[x].mem = members; call[x].bits = value
    :: else ->
        assert(call[x].what == kind && call[x].gen == generation && call[x].mem == members);
        call[x].bits = call[x].bits & (value)
    fi;
    call[x].in = call[x].in | BIT(me)
}

/* Can it end: every living member is in, or had been when it was decided. */
#define ENDS(f, slot) (call[2*(f)+slot].decided || (call[2*(f)+slot].mem & ~call[2*(f)+slot].in & ~dead) == 0)

/* Its end. The outcome is decided once for all. A member that died without having come makes an agreement fail and
 * is left out by a shrink; one that died after it had come may or may not, and may make a shrink fail. */
inline finish(f, slot) {
    x = 2*(f) + slot;
    if
    :: call[x].decided
    :: else ->
        h = call[x].mem & dead & call[x].in;           /* came, and died */
        if
        :: call[x].what != SHRINK && (call[x].mem & ~call[x].in) -> call[x].result = FAILED
        :: call[x].what != SHRINK && !(call[x].mem & ~call[x].in) -> call[x].result = call[x].bits
        :: h -> call[x].result = FAILED
        :: call[x].what == SHRINK ->
            call[x].result = call[x].mem & call[x].in;
            k = 0;
            do
            :: k < N && (h & BIT(k)) -> k++
            :: k < N && (h & BIT(k)) -> call[x].result = call[x].result & ~BIT(k); k++
            :: k < N && !(h & BIT(k)) -> k++
            :: k == N -> break
            od
        fi;
        call[x].decided = true;
        /* every living member has come here, so all have read the call before */
        m = 2*(f) + 1 - slot;
        call[m].what = 0; call[m].gen = 0; call[m].mem = 0; call[m].in = 0; call[m].bits = 0;
        call[m].result = 0; call[m].decided = false
    fi;
    r = call[x].result;
#ifdef MPI_AGREE_NOT_UNIFORM
    if
    :: call[x].what != SHRINK && (call[x].mem & dead) -> r = FAILED
    :: true
    fi;
#endif
#ifdef MPI_SHRINK_NOT_UNIFORM
    if
    :: call[x].what == SHRINK && (call[x].mem & dead) -> r = FAILED
    :: true
    fi;
#endif
    slot = 1 - slot
}

inline revoke() {
#ifndef BUG_NO_REVOKE
    if :: revoked_world <= wgen -> revoked_world = wgen + 1 :: else fi;
    if :: revoked_cross[COORD(me)] <= cgen -> revoked_cross[COORD(me)] = cgen + 1 :: else fi
#else
    skip
#endif
}

/* What engine._raise_if_broken can see. Wherever a step may see it there is also a step that has not yet seen it,
 * unless the rank waits for something. */
#define BROKEN   ((wmem & dead) || revoked_world > wgen || revoked_cross[COORD(me)] > cgen)
#ifdef BUG_ORPHAN_STAYS
#define ORPHANED false
#else
#define ORPHANED (S == 2 && (dead & BIT(MATE(me))))
#endif

/* SIGKILL to oneself: the `unless` of the process takes it from here. */
#define LEAVE CLEAR; dead = dead | BIT(me); false

/* ---- engine.py and repair.py ---------------------------------------------------------------------------------- */

/* One pass of repair(): revoke both; settle, which may see that this is an orphan, or give up waiting; shrink. */
inline begin_pass() {
    revoke();
    if
    :: ORPHANED -> LEAVE
    :: true
    fi;
    enter(0, wslot, SHRINK, wgen, wmem, 0);
    pc = WORLD_SHRINK
}

inline after_world_shrink() {
    if
    :: r == FAILED -> clean = 0
    :: else -> clean = 1; wmem = r; wgen++; assert(wgen < 16)
    fi;
    ops[me] = 0; tag[me] = 0;
    enter(1+COORD(me), cslot, SHRINK, cgen, cmem, 0);
    pc = CROSS_SHRINK
}

inline after_cross_shrink() {
    if
    :: r == FAILED -> clean = 0; after_cross_agree()
    :: else ->
        cmem = r; cgen++;
        enter(1+COORD(me), cslot, REPAIR_AGREE, cgen, cmem, clean);
        pc = CROSS_AGREE
    fi
}

inline after_cross_agree() {
    enter(0, wslot, REPAIR_AGREE, wgen, wmem, clean);
    pc = WORLD_AGREE
}

inline after_world_agree() {
    if
    :: r == FAILED || r == 0 -> begin_pass()           /* another rank died meanwhile */
    :: else ->
        h = 0; m = 0; k = 0;                           /* h: whole replicas of the new world; m: their ranks */
        do
        :: k < R ->
            if
            :: (wmem & RANKS_OF(k)) == RANKS_OF(k) -> h = h | BIT(k); m = m | RANKS_OF(k)
            :: else
            fi;
            k++
        :: else -> break
        od;
        if
        :: m == wmem ->
            /* the two groups fit together, and each repair has lost a replica, so there are finitely many */
            k = 0;
            do
            :: k < N -> assert(COORD(k) != COORD(me) || (wmem & BIT(k)) == (cmem & BIT(k))); k++
            :: else -> break
            od;
            assert(h != alive && (h & ~alive) == 0);
            epoch++; alive = h;
            pc = back
        :: m != wmem && !(h & BIT(REPLICA(me))) ->
#ifndef BUG_ORPHAN_STAYS
            LEAVE
#else
            begin_pass()
#endif
        :: m != wmem && (h & BIT(REPLICA(me))) -> begin_pass()   /* orphans are in it; the next pass drops them */
        fi
    fi
}

/* A failure seen outside an agreement; `then` is where this rank goes on after the repair. */
inline join_repair(then) {
    back = then;
    revoke();
    pc = JOIN
}

/* One operation of a round: op 0, 2, ... barrier, 1, 3, ... all-reduce of a bucket, 2*NB the exchange. Once all are
 * in, it may end well. It fails when it is revoked; or, while it waits with an eye on the world, when somebody is
 * dead; but the all-reduce itself is only sure to notice the death of its neighbour. */
#define REDUCES (op < 2*NB && op % 2 == 1)
#define IN(i)   (!(cmem & BIT(i)) || ops[(i)%N] >= ops[me])
#define ALL_IN  (IN(0) && (N < 2 || IN(1)) && (N < 3 || IN(2)) && (N < 4 || IN(3)) && (N < 5 || IN(4)) && (N < 6 || IN(5)))

#ifdef BUG_STALE_OPERATIONS
#define GONE false
#else
#define GONE (session_epoch != epoch)
#endif

#ifdef GUARD_GONE_OFF
#define FAILED_OPERATION op = 0
#else
#define FAILED_OPERATION op = 0; ok = false
#endif

inline start_operation() {
    if
#ifdef GUARD_GONE_OFF
    :: GONE -> pc = ATTEMPT
#else
    :: GONE -> ok = false; pc = ATTEMPT
#endif
    :: !GONE && !REDUCES && ORPHANED -> LEAVE
    :: !GONE && !REDUCES && BROKEN -> FAILED_OPERATION; join_repair(ATTEMPT)
    :: !GONE -> ops[me]++; tag[me] = 8*it + round; pc = OPERATION
    fi
}

inline end_operation() {
    h = 0; m = 0; k = 0;
    do
    :: k < N && (cmem & BIT(k)) ->
        assert(tag[k] == tag[me]);                     /* all are in the same round of the same iteration */
        m = m | twice[k] | (h & have[k]);
        h = h | have[k];
        k++
    :: k < N && !(cmem & BIT(k)) -> k++
    :: k == N -> break
    od;
    if
    :: REDUCES ->
        sum = h; sum_twice = m;
#ifdef BUG_IN_PLACE
        have[me] = h; twice[me] = m;
#endif
    :: else
    fi;
    op++;
    if
    :: op <= 2*NB -> start_operation()
#ifdef BUG_COMMIT_WITHOUT_AGREEMENT
    :: else -> op = 0; commit()
#else
    :: else -> op = 0; pc = ATTEMPT
#endif
    fi
}

/* Whether the neighbour in the cross-replica group (the next member, cyclic) is dead. */
#define NEXT(i)    ((me+(i)*S)%N)
#define IS_NEXT(i) (cmem & BIT(NEXT(i)))
#define NEIGHBOUR_DEAD \
    (IS_NEXT(1) -> (dead & BIT(NEXT(1))) : (IS_NEXT(2) -> (dead & BIT(NEXT(2))) : (dead & BIT(NEXT(3)))))

#ifdef GUARD_VOTE_OFF
#define VOTE (ok -> OK|RUNNING : RUNNING)
#else
#define VOTE (ok && session_epoch == epoch -> OK|RUNNING : RUNNING)
#endif
#ifdef BUG_NO_RUNNING_BIT
#define GOES_ON (r != FAILED)
#else
#define GOES_ON (r != FAILED && (r & RUNNING))
#endif

/* session.agree has its answer: it must be the same on all ranks. */
inline agreed() {
    ok = (r & OK) != 0;
    session_epoch = epoch; session_alive = alive;
    n = (n + 1) % 128;
    if
    :: decision[n%2].n == n ->
        assert(decision[n%2].ok == ok && decision[n%2].epoch == epoch && decision[n%2].alive == alive)
    :: else ->
        decision[n%2].n = n; decision[n%2].ok = ok; decision[n%2].epoch = epoch; decision[n%2].alive = alive
    fi
}

/* ---- workload/balanced.py ------------------------------------------------------------------------------------- */

inline assign() {
    h = R - 1; k = 0;
    do
    :: k < R -> ids[k] = 0; k++
    :: else -> break
    od;
    k = 0;
    do
    :: k < G ->
        h = (h + 1) % R;
        do
        :: !(plan_alive & BIT(h)) -> h = (h + 1) % R
        :: else -> break
        od;
        ids[h] = ids[h] | BIT(k); k++
    :: else -> break
    od
}

#define BITS(v) (((v)&1)+(((v)>>1)&1)+(((v)>>2)&1)+(((v)>>3)&1)+(((v)>>4)&1)+(((v)>>5)&1))

inline reassign() {
    m = 0; k = 0;                                      /* m: ids of the lost */
    do
    :: k < R && !(session_alive & BIT(k)) -> m = m | ids[k]; ids[k] = 0; k++
    :: k < R && (session_alive & BIT(k)) -> k++
    :: else -> break
    od;
    plan_alive = session_alive;
    h = 0;
    do
    :: h < G && (m & BIT(h)) ->
        x = R; k = 0;                                  /* x: the least loaded, the lowest of them */
        do
        :: k < R ->
            if
            :: (plan_alive & BIT(k)) && x == R -> x = k
            :: (plan_alive & BIT(k)) && x != R ->
                if :: BITS(ids[k]) < BITS(ids[x]) -> x = k :: else fi
            :: else
            fi;
            k++
        :: else -> break
        od;
        ids[x] = ids[x] | BIT(h); h++
    :: h < G && !(m & BIT(h)) -> h++
    :: else -> break
    od
}

/* ---- session.py ----------------------------------------------------------------------------------------------- */

#ifdef BUG_LEADER_FROM_ENGINE
#define LEADS_FROM alive
#else
#define LEADS_FROM session_alive
#endif

inline begin_iteration() {
    if
    :: it > IT -> doing = CLOSE; ok = true; pc = ATTEMPT
    :: else ->
#ifdef BUG_PLAN_FROM_ENGINE
        session_epoch = epoch; session_alive = alive;
#endif
        plan_alive = session_alive;
        d_step { assign(); CLEAR }
        have[me] = 0; twice[me] = 0; round = 1;
        doing = TRAIN; begin_compute()
    fi
}

/* The training thread computes; in it are the replica's own collectives, which need the other ranks of the replica. */
inline begin_compute() {
    at[me] = (S == 1 -> 0 : (at[me] + 1) % 4);
    pc = COMPUTE
}
#define MATE_THERE (S == 1 || at[MATE(me)] == at[me] || at[MATE(me)] == (at[me] + 1) % 4)

inline end_compute() {
    if
    :: doing == TRAIN ->
        m = ids[REPLICA(me)] & ~have[me];              /* what the plan gives to this replica beyond what it has */
        have[me] = have[me] | m;
        ok = true; op = 0; epoch_of_round = session_epoch;
        start_operation()
    :: doing == OPTIMIZER && it == 1 -> doing = SAVE; begin_save()
    :: doing == BETWEEN || (doing == OPTIMIZER && it != 1) -> it++; begin_iteration()
    :: doing == SAVE ->
        saved = saved | BIT(me); working = working & ~BIT(me);
        ok = true; pc = ATTEMPT
    fi
}

inline commit() {
    assert(sum == FULL && sum_twice == 0);             /* every microbatch is in, exactly once */
    k = 0;
    if
    :: commits[it%2].it == it ->
        assert(commits[it%2].epoch == epoch_of_round);
        do
        :: k < R -> assert(commits[it%2].ids[k] == ids[k]); k++
        :: else -> break
        od
    :: else ->
        assert(commits[it%2].it < it);
        commits[it%2].it = it; commits[it%2].epoch = epoch_of_round;
        do
        :: k < R -> commits[it%2].ids[k] = ids[k]; k++
        :: else -> break
        od
    fi;
    sum = 0; sum_twice = 0; epoch_of_round = 0;
    doing = OPTIMIZER; begin_compute()
}

inline take_over() {
    assert(session_alive != plan_alive);               /* a no without a loss */
    d_step { reassign(); CLEAR }
    sum = 0; sum_twice = 0;
    round++;
    begin_compute()
}

/* session.by_leader, around a save */
inline begin_save() {
    leader = 0;
    do
    :: !(LEADS_FROM & BIT(leader)) -> leader++
    :: else -> break
    od;
    if
    :: REPLICA(me) == leader ->
        assert((working & ~dead & ~RANKS_OF(leader)) == 0);   /* no two replicas save at a time */
        working = working | BIT(me);
        begin_compute()
    :: else -> ok = true; pc = ATTEMPT
    fi
}

inline end_save() {
#ifdef BUG_NO_TAKEOVER
    if
    :: true ->
#else
    if
    :: !(session_alive & BIT(leader)) -> begin_save()
    :: else ->
#endif
        assert((saved & RANKS_OF(leader)) == RANKS_OF(leader));
        leader = 0;
        doing = BETWEEN; begin_compute()
    fi
}

inline after_agreement() {
    if
    :: doing == TRAIN && ok -> ok = false; commit()
    :: doing == TRAIN && !ok -> take_over()
    :: doing == SAVE -> ok = false; end_save()
    :: doing == CLOSE ->
#ifdef CLOSING
        LEAVE                                          /* one after another: the others may take it for a failure */
#else
        pc = DONE
#endif
    fi
}

/* ---- a rank --------------------------------------------------------------------------------------------------- */

/* Each alternative is one step: what follows a wait, up to and with the entry into the next one. Between any two
 * steps, of this rank or another, any rank may die. */
mtype = { BEGIN, COMPUTE, OPERATION, ATTEMPT, AGREED, JOIN, JOINED, WORLD_SHRINK, CROSS_SHRINK, CROSS_AGREE, WORLD_AGREE,
          DONE, TRAIN, OPTIMIZER, SAVE, BETWEEN, CLOSE };

proctype rank(byte me) {
    mtype pc = BEGIN, back = BEGIN, doing = TRAIN;
    byte wmem = BIT(N)-1, wgen = 0, cmem = 0, cgen = 0;               /* comms.world, comms.cross */
    bit wslot = 0, cslot = 0;
    byte epoch = 0, alive = BIT(R)-1;                                 /* engine.epoch, engine.alive */
    byte session_epoch = 0, session_alive = BIT(R)-1;                 /* session.epoch, session.alive */
    byte plan_alive = 0, ids[R];                                      /* iteration.plan */
    byte it = 1, round = 0, op = 0, n = 0, sum = 0, sum_twice = 0, r = 0, clean = 0, leader = 0, epoch_of_round = 0;
    bool ok = false;
    {
        do
        :: atomic { pc == BEGIN ->
            do
            :: k < N -> if :: COORD(k) == COORD(me) -> cmem = cmem | BIT(k) :: else fi; k++
            :: else -> break
            od;
            begin_iteration(); CLEAR }

        :: atomic { pc == COMPUTE && MATE_THERE -> end_compute(); CLEAR }
        :: atomic { pc == COMPUTE && ORPHANED -> LEAVE }
        :: atomic { pc == COMPUTE && BROKEN -> join_repair(COMPUTE) }

        :: atomic { pc == OPERATION && ALL_IN -> end_operation(); CLEAR }
        :: atomic { pc == OPERATION && !REDUCES && ORPHANED -> LEAVE }
        :: atomic { pc == OPERATION && (REDUCES -> (revoked_cross[COORD(me)] > cgen || NEIGHBOUR_DEAD) : BROKEN) ->
            FAILED_OPERATION; join_repair(ATTEMPT) }

        :: atomic { pc == ATTEMPT && ORPHANED -> LEAVE }
        :: atomic { pc == ATTEMPT && BROKEN -> join_repair(ATTEMPT) }
        :: atomic { pc == ATTEMPT -> enter(0, wslot, AGREE, wgen, wmem, VOTE); pc = AGREED; CLEAR }

        :: atomic { pc == AGREED && ENDS(0, wslot) ->
            finish(0, wslot);
            if
            :: GOES_ON -> agreed(); after_agreement()
            :: else -> back = ATTEMPT; begin_pass()
            fi;
            r = 0; CLEAR }

#ifdef BUG_REPAIR_AT_ONCE
        :: atomic { pc == JOIN -> begin_pass(); CLEAR }
#else
        :: atomic { pc == JOIN -> enter(0, wslot, AGREE, wgen, wmem, 0); pc = JOINED; CLEAR }
#endif
        :: atomic { pc == JOINED && ENDS(0, wslot) -> finish(0, wslot); r = 0; begin_pass(); CLEAR }

        :: atomic { pc == WORLD_SHRINK && ENDS(0, wslot) -> finish(0, wslot); after_world_shrink(); r = 0; CLEAR }
        :: atomic { pc == CROSS_SHRINK && ENDS(1+COORD(me), cslot) ->
            finish(1+COORD(me), cslot); after_cross_shrink(); r = 0; CLEAR }
        :: atomic { pc == CROSS_AGREE && ENDS(1+COORD(me), cslot) ->
            finish(1+COORD(me), cslot); clean = (r == FAILED -> 0 : r); after_cross_agree(); r = 0; CLEAR }
        :: atomic { pc == WORLD_AGREE && ENDS(0, wslot) -> finish(0, wslot); clean = 0; after_world_agree(); r = 0; CLEAR }

        :: pc == DONE -> break
        od
    } unless { dead & BIT(me) };
    atomic {
        /* forget, so that states which differ only in what a dead rank knew are one */
        pc = BEGIN; back = BEGIN; doing = TRAIN;
        wmem = 0; wgen = 0; cmem = 0; cgen = 0; wslot = 0; cslot = 0; epoch = 0; alive = 0; session_epoch = 0;
        session_alive = 0; plan_alive = 0; it = 0; round = 0; op = 0; n = 0; sum = 0; sum_twice = 0; r = 0;
        clean = 0; leader = 0; epoch_of_round = 0; ok = false; working = working & ~BIT(me);
        do
        :: k < R -> ids[k] = 0; k++
        :: else -> break
        od;
        CLEAR
    }
}

/* Ends any rank at any step. */
inline kill(i) { dead = dead | BIT(i); failures++ }

proctype killer() {
end:
    do
    :: atomic { failures < F && !(dead & 1) -> kill(0) }
    :: atomic { N > 1 && failures < F && !(dead & 2) -> kill(1) }
    :: atomic { N > 2 && failures < F && !(dead & 4) -> kill(2) }
    :: atomic { N > 3 && failures < F && !(dead & 8) -> kill(3) }
    :: atomic { N > 4 && failures < F && !(dead & 16) -> kill(4) }
    :: atomic { N > 5 && failures < F && !(dead & 32) -> kill(5) }
    od
}

init {
    byte i = 0;
    atomic {
        do
        :: i < N -> run rank(i); i++
        :: else -> break
        od;
        i = 0;
        run killer()
    }
}
