// A Work of an inner backend under another way to wait: everything else is the inner Work's.
#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace echo::pg {

class DelegatingWork : public c10d::Work {
 public:
  DelegatingWork(int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> inner)
      : Work(rank, type), inner_(std::move(inner)) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return inner_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return inner_->getFutureResult(); }
  float getDuration() const override { return inner_->getDuration(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }

 protected:
  const c10::intrusive_ptr<c10d::Work> inner_;
};

}  // namespace echo::pg
