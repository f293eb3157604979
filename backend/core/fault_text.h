// A fault of a peer-memory group in words, for errors that users read.
#pragma once

#include <string>

#include "call_record.h"
#include "protocol.h"

namespace echo {

// What the rank that reports knows beside the fault itself.
struct FaultWitness {
  int32_t rank = 0;
  CallRecord mine;
  CallRecord theirs;  // of the peer that the fault concerns, as last seen; magic 0: nothing is known
};

// Empty for kind kNone.
std::string describe_fault(const FaultRecord& fault, const FaultWitness& witness);

}  // namespace echo
