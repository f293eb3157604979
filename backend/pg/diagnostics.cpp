#include "diagnostics.hpp"

#include <ATen/ATen.h>

namespace echo::pg {
namespace {

ErrorNorms norms_of(const at::Tensor& error) {
  return ErrorNorms{.l2 = error.square().sum().sqrt().item<double>(), .max_abs = error.abs().max().item<double>()};
}

}  // namespace

Diagnostics::Before Diagnostics::measure_before(const at::Tensor& tensor, const at::Tensor& correction,
                                                c10d::Backend& inner, const std::function<void(c10d::Work&)>& wait) {
  const at::Tensor raw = tensor.flatten().to(at::kDouble);
  const at::Tensor added = correction.defined() ? correction.to(raw.options()) : at::zeros_like(raw);
  std::vector<at::Tensor> sums = {at::stack({raw, added})};
  const c10::intrusive_ptr<c10d::Work> work = inner.allreduce(sums);
  if (wait) {
    wait(*work);
  } else {
    work->wait();
  }
  return Before{sums[0][0], sums[0][1]};
}

void Diagnostics::measure_after(const MeasuredSite& site, const Before& before, const at::Tensor& delivered) {
  const at::Tensor rho = delivered.flatten().to(at::kDouble) - before.raw_sum;
  const auto d = static_cast<size_t>(site.direction);
  const std::lock_guard lock(mutex_);
  if (site.starts_pass) {
    errors_[d].clear();
    partial_sums_[d].clear();
  }
  at::Tensor& partial = partial_sums_[d][site.key];
  partial = partial.defined() ? partial + rho : rho;
  errors_[d].push_back(SiteErrors{.site = site.site,
                                  .lane = site.key.lane,
                                  .half = site.key.half,
                                  .numel = site.key.numel,
                                  .rho = norms_of(rho),
                                  .partial = norms_of(partial),
                                  .delta = norms_of(rho - before.correction_sum)});
}

std::vector<SiteErrors> Diagnostics::errors(Direction direction) const {
  const std::lock_guard lock(mutex_);
  return errors_[static_cast<size_t>(direction)];
}

}  // namespace echo::pg
