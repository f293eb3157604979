/* The peer-memory protocol of backend/core/protocol.h: P ranks, one lane, look-ahead d = 1, two calls of unequal size.
 *
 * Each rank's slab has two rings of D slots per source: pushes and gathers. A slot is a value and a ticket; the value names the call and the
 * tile it was made for, so that an overwritten, stale or foreign slot shows as a failed assertion where it is consumed. Writing a slot takes two steps
 * (value, then ticket), and so does reading one (ticket, then value): the model may interleave anything between them.
 *
 *   -DP=2|3           ranks
 *   -DD=n             slots; 3 = 2d+1 must hold, 2 = 2d must fail
 *   -DABORT           any rank may fault at any step of the first call and poison everybody; all must leave, none may hang
 *   -DRESUME          after such a fault ranks go on with the next call, with the counters as they stand: must fail
 *   -DUNEQUAL         the last rank believes that the first call has one tile more: must end in a fault, no value may be accepted
 *   -DNO_HASH         tickets without the hash of the call; with UNEQUAL: must fail
 */
#ifndef P
#define P 2
#endif
#ifndef D
#define D 3
#endif
#define CALLS 2

#define SLOT(owner, source, k) (((owner) * P + (source)) * D + (k) % D)
#define VALUE(call, tile) (1 + (call) * 8 + (tile))
#ifdef NO_HASH
#define HASH(call, tiles) 1
#else
#define HASH(call, tiles) (1 + (call) * 8 + (tiles))
#endif

byte push_value[P * P * D], push_sequence[P * P * D], push_hash[P * P * D];
byte gather_value[P * P * D], gather_sequence[P * P * D], gather_hash[P * P * D];
bool poison[P];
byte left;

inline poison_all() {
  peer = 0;
  do
  :: peer < P -> poison[peer] = true; peer++
  :: else -> break
  od
}

/* Waits for the ticket of tile k in slot `at`; `faulted` afterwards if this rank must leave. A macro, since inlines take no arrays. */
#define HERE(sequence, hash, at) (sequence[at] == k + 1 && hash[at] == expected_hash)
#define WAIT_FOR(sequence, hash, at) \
  do \
  :: poison[me] -> faulted = true; break \
  :: !poison[me] && HERE(sequence, hash, at) -> break \
  :: !poison[me] && sequence[at] >= k + 1 && !HERE(sequence, hash, at) -> poison_all(); faulted = true; break \
  od

proctype Rank(byte me) {
  byte call, tiles, step, peer, source, first, k, expected_hash;
  bool faulted;
  first = 0;
  call = 0;
  do
  :: call == CALLS -> break
  :: call < CALLS ->
    tiles = (call == 0 -> 3 : 2);
#ifdef UNEQUAL
    if
    :: call == 0 && me == P - 1 -> tiles = 4
    :: else
    fi;
#endif
    expected_hash = HASH(call, tiles);
    step = 0;
    do
    :: faulted || step == tiles + 2 -> break
    :: !faulted && step < tiles + 2 ->
#ifdef ABORT
      if
      :: call == 0 -> poison_all(); faulted = true
      :: true
      fi;
#endif
      /* push(step) */
      if
      :: !faulted && step < tiles ->
        k = first + step;
        source = 0;
        do
        :: source == P -> break
        :: source < P && source == me -> source++
        :: source < P && source != me ->
          push_value[SLOT(source, me, k)] = VALUE(call, step);
          d_step { push_hash[SLOT(source, me, k)] = expected_hash; push_sequence[SLOT(source, me, k)] = k + 1 };
          source++
        od
      :: else
      fi;
      /* reduce(step - 1), gather(step - 1) */
      if
      :: !faulted && step >= 1 && step - 1 < tiles ->
        k = first + step - 1;
        source = 0;
        do
        :: faulted || source == P -> break
        :: !faulted && source < P && source == me -> source++
        :: !faulted && source < P && source != me ->
          WAIT_FOR(push_sequence, push_hash, SLOT(me, source, k));
          if
          :: !faulted -> assert(push_value[SLOT(me, source, k)] == VALUE(call, step - 1))
          :: else
          fi;
          source++
        od;
        source = 0;
        do
        :: faulted || source == P -> break
        :: !faulted && source < P && source == me -> source++
        :: !faulted && source < P && source != me ->
          gather_value[SLOT(source, me, k)] = VALUE(call, step - 1);
          d_step { gather_hash[SLOT(source, me, k)] = expected_hash; gather_sequence[SLOT(source, me, k)] = k + 1 };
          source++
        od
      :: else
      fi;
      /* tail(step - 2) */
      if
      :: !faulted && step >= 2 ->
        k = first + step - 2;
        source = 0;
        do
        :: faulted || source == P -> break
        :: !faulted && source < P && source == me -> source++
        :: !faulted && source < P && source != me ->
          WAIT_FOR(gather_sequence, gather_hash, SLOT(me, source, k));
          if
          :: !faulted -> assert(gather_value[SLOT(me, source, k)] == VALUE(call, step - 2))
          :: else
          fi;
          source++
        od
      :: else
      fi;
      step++
    od;
#ifdef RESUME
    if
    :: faulted -> faulted = false; poison[me] = false; first = first + step
    :: else -> first = first + tiles
    fi;
#else
    first = first + tiles;
    if
    :: faulted -> break
    :: else
    fi;
#endif
    call++
  od;
  left++
#if !defined(ABORT) && !defined(UNEQUAL)
  ;
  assert(!faulted)
#endif
}

init {
  byte i;
  atomic {
    i = 0;
    do
    :: i < P -> run Rank(i); i++
    :: else -> break
    od
  }
  left == P
}
