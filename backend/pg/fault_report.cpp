#include "fault_report.hpp"

#include <algorithm>
#include <charconv>
#include <string_view>

namespace echo::pg {
namespace {

constexpr std::string_view kVersion = "echo fault report 1";
constexpr char kEnds[] = "the group ends";
constexpr char kSurvives[] = "the group survives";

// "echo fault report 1, rank 3, the group ends": the line for these two.
std::string heading(int32_t rank, GroupFate fate) {
  return std::string(kVersion) + ", rank " + std::to_string(rank) + ", " +
         (fate == GroupFate::kEnds ? kEnds : kSurvives);
}

// Bytes of the UTF-8 character that `text` starts with, 0 if it starts with none.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || lead > 0xf4) return 0;
  const size_t length = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  if (text.size() < length) return 0;
  // No second way to write a character, no surrogates, nothing beyond U+10FFFF.
  const uint8_t lowest = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const uint8_t highest = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  if (byte(1) < lowest || byte(1) > highest) return 0;
  for (size_t i = 2; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

// Fit for a Python exception and a terminal.
std::string printable(std::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t length = character_bytes(text);
    const bool control = static_cast<uint8_t>(text[0]) < ' ' && text[0] != '\n';
    if (length == 0 || control || text[0] == '\x7f') {
      shown += '?';
    } else {
      shown += text.substr(0, length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return shown;
}

}  // namespace

std::string FaultReport::in_words() const {
  return rank ? "rank " + std::to_string(*rank) + " reports: " + text : text;
}

std::string to_stored(const FaultReport& report) {
  return heading(report.rank.value_or(-1), report.fate) + '\n' + report.text;
}

FaultReport from_stored(const std::string& stored, int32_t size) {
  const std::string_view all = stored;
  const std::string_view line = all.substr(0, all.find('\n'));
  constexpr size_t kBeforeRank = kVersion.size() + sizeof(", rank ") - 1;
  int32_t rank = -1;
  if (line.size() > kBeforeRank && line.size() < all.size()) {
    std::from_chars(line.data() + kBeforeRank, line.data() + line.size(), rank);
  }
  for (const GroupFate fate : {GroupFate::kEnds, GroupFate::kSurvives}) {
    if (rank < 0 || rank >= size || line != heading(rank, fate)) continue;
    return {rank, fate, printable(all.substr(line.size() + 1, FaultReport::kMostTextBytes))};
  }
  return {std::nullopt, GroupFate::kEnds, "what lies in the store is no report of a rank"};
}

}  // namespace echo::pg
