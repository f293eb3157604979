#include "fault_text.h"

#include <sstream>

namespace echo {
namespace {

const char* name_of(int32_t stage) { return stage == static_cast<int32_t>(Stage::kPush) ? "push" : "gather"; }

}  // namespace

std::string describe_fault(const FaultRecord& fault, const FaultWitness& witness) {
  std::ostringstream out;
  switch (fault.kind) {
    case FaultKind::kNone:
      return {};
    case FaultKind::kAborted:
      out << "the group was aborted by rank " << fault.rank;
      return out.str();
    case FaultKind::kOverlap:
      out << "rank " << fault.rank
          << " began a call before its last one had ended (a graph replayed on another stream?)";
      return out.str();
    case FaultKind::kPeerExited:
      out << "the process of rank " << fault.peer << " has exited";
      break;
    case FaultKind::kTimeout:
      out << "rank " << fault.peer << " did not come within " << fault.timeout_ms << " ms";
      break;
    case FaultKind::kForeignTicket:
      out << "rank " << fault.peer << " is in another call";
      break;
  }
  out << " (rank " << fault.rank << " waited in " << name_of(fault.stage) << ", lane " << fault.lane
      << ", expected ticket " << std::hex << fault.expected << ", saw " << fault.seen << ")" << std::dec;
  if (fault.kind == FaultKind::kTimeout && witness.theirs.magic != 0 && fault.rank == witness.rank) {
    out << "; the last call it came to: " << describe_call(witness.theirs);
  }
  // The author of the record may be either of the two that disagree.
  const int32_t other = fault.rank == witness.rank ? fault.peer : fault.rank;
  if (fault.kind == FaultKind::kForeignTicket && witness.theirs.magic != 0 &&
      (fault.rank == witness.rank || fault.peer == witness.rank)) {
    out << ": " << describe_mismatch(witness.mine, witness.rank, witness.theirs, other);
  }
  return out.str();
}

}  // namespace echo
