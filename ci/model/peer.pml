/* The peer-memory protocol of backend/core/protocol.h: P ranks, one lane, look-ahead d = 1, two calls of unequal size.
 *
 * Each rank's slab has two rings per source: DP slots of pushes and D of gathers. A slot is a value and a ticket; the value names the call and the
 * tile it was made for, so that an overwritten, stale or foreign slot shows as a failed assertion where it is consumed. Writing a slot takes two steps
 * (value, then ticket), and so does reading one (ticket, then value): the model may interleave anything between them.
 *
 *   -DP=2|3           ranks
 *   -DD=n             slots of a ring; 3 = 2d+1 must hold, 2 = 2d must fail
 *   -DDP=n            those of pushes, if not as many: in the kernel's orders 2 = 2d must hold and 1 must fail, on the CPU 2 must
 *   -DABORT           any rank may fault at any step of the first call and poison everybody; all must leave, none may hang
 *   -DRESUME          after such a fault ranks go on with the next call, with the counters as they stand: must fail
 *   -DUNEQUAL         the last rank believes that the first call has one tile more: must end in a fault, no value may be accepted
 *   -DKERNEL          a step as the CUDA kernel takes it: waits first, then push and reduce, both tickets after them, then tail
 *   -DKERNEL_STORES_FIRST   as half of its lanes take it: tail first and a tile later; without either: as on the CPU
 *   -DNO_HASH         tickets without the hash of the call; with UNEQUAL: must fail
 */
#ifndef P
#define P 2
#endif
#ifndef D
#define D 3
#endif
#ifndef DP
#define DP D
#endif
#define CALLS 2

#define SLOT_push(owner, source, k) (((owner) * P + (source)) * DP + (k) % DP)
#define SLOT_gather(owner, source, k) (((owner) * P + (source)) * D + (k) % D)
#define VALUE(call, tile) (1 + (call) * 8 + (tile))
#ifdef NO_HASH
#define HASH(call, tiles) 1
#else
#define HASH(call, tiles) (1 + (call) * 8 + (tiles))
#endif

byte push_value[P * P * DP], push_sequence[P * P * DP], push_hash[P * P * DP];
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

/* One tile of a ring between this rank and every other. Macros, since inlines take no arrays. `i` is the tile's number in the call. */
#define EACH_OTHER(body) \
  other = 0; \
  do \
  :: faulted || other == P -> break \
  :: !faulted && other < P && other == me -> other++ \
  :: !faulted && other < P && other != me -> body; other++ \
  od
#define TILE(i, body) \
  if \
  :: !faulted && (i) >= 0 && (i) < tiles -> k = first + (i); body \
  :: else \
  fi

/* Until its ticket has come from everyone; `faulted` afterwards if this rank must leave. */
#define HERE(ring, at) (ring##_sequence[at] == k + 1 && ring##_hash[at] == expected_hash)
#define WAIT_FOR(ring, at) \
  do \
  :: poison[me] -> faulted = true; break \
  :: !poison[me] && HERE(ring, at) -> break \
  :: !poison[me] && ring##_sequence[at] >= k + 1 && !HERE(ring, at) -> poison_all(); faulted = true; break \
  od
#define WAIT(ring, i) TILE(i, EACH_OTHER(WAIT_FOR(ring, SLOT_##ring(me, other, k))))
/* What has come. */
#define READ(ring, i) TILE(i, EACH_OTHER(assert(ring##_value[SLOT_##ring(me, other, k)] == VALUE(call, (i)))))
/* Values to everyone, and later their tickets. */
#define WRITE(ring, i) TILE(i, EACH_OTHER(ring##_value[SLOT_##ring(other, me, k)] = VALUE(call, (i))))
#define RELEASE(ring, i) \
  TILE(i, EACH_OTHER(d_step { ring##_hash[SLOT_##ring(other, me, k)] = expected_hash; ring##_sequence[SLOT_##ring(other, me, k)] = k + 1 }))

/* A step in the order of a composition, and how many steps a call has more than tiles. */
#if defined(KERNEL)
#define BEHIND 2
#define STEP \
  WAIT(push, step - 1); WAIT(gather, step - 2); \
  WRITE(push, step); READ(push, step - 1); WRITE(gather, step - 1); \
  RELEASE(push, step); RELEASE(gather, step - 1); \
  READ(gather, step - 2)
#elif defined(KERNEL_STORES_FIRST)
#define BEHIND 3
#define STEP \
  WAIT(gather, step - 3); READ(gather, step - 3); \
  WAIT(push, step - 1); \
  WRITE(push, step); READ(push, step - 1); WRITE(gather, step - 1); \
  RELEASE(push, step); RELEASE(gather, step - 1)
#else
#define BEHIND 2
#define STEP \
  WRITE(push, step); RELEASE(push, step); \
  WAIT(push, step - 1); READ(push, step - 1); WRITE(gather, step - 1); RELEASE(gather, step - 1); \
  WAIT(gather, step - 2); READ(gather, step - 2)
#endif

proctype Rank(byte me) {
  byte call, peer, other, first, k, expected_hash;
  short tiles, step;
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
    :: faulted || step == tiles + BEHIND -> break
    :: !faulted && step < tiles + BEHIND ->
#ifdef ABORT
      if
      :: call == 0 -> poison_all(); faulted = true
      :: true
      fi;
#endif
      STEP;
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
