// What a call is called in messages; put into words only where there is something to say.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <c10/util/StringUtil.h>

namespace echo::pg {

struct CallName {
  int rank = 0;
  int size = 1;
  uint64_t number = 0;
  int64_t numel = 0;
  std::string_view dtype;  // of static storage
  std::shared_ptr<const std::string> group;
  std::string reason = {};  // why the call is forwarded; empty: it is quantized

  std::string text() const {
    return c10::str("rank ", rank, " of ", size, reason.empty() ? ": quantized" : ": exact", " all_reduce number ",
                    number, " (", numel, " elements, ", dtype, reason.empty() ? "" : "; ", reason, ") of group '",
                    group ? *group : std::string(), "'");
  }
};

}  // namespace echo::pg
