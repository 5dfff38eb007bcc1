#include "pool.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

#include "pause.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace tpi {

namespace {

constexpr int64_t kMostPatience = 200'000;  // nanoseconds of spinning
constexpr int64_t kLeastPatience = 2'000;
constexpr std::chrono::microseconds kWorthSpinning{250};  // a shorter wait, waking included, is worth spinning

double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

Pool* current = nullptr;

}  // namespace

Arena::~Arena() {
    for (Slab& slab : slabs_) std::free(slab.data);
}

void* Arena::take_bytes(size_t bytes) {
    if (used_ == slabs_.size()) slabs_.push_back({nullptr, 0});
    Slab& slab = slabs_[used_++];
    if (slab.bytes < bytes) {
        std::free(slab.data);
        size_t whole = (bytes + bytes / 4 + 127) / 64 * 64;
        slab.data = std::aligned_alloc(64, whole);
        slab.bytes = slab.data ? whole - 64 : 0;
        if (!slab.data) throw std::bad_alloc();
    }
    return slab.data;
}

void Signal::advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) value_.notify_all();
}

void Signal::wait_while(uint32_t seen) {
    using Clock = std::chrono::steady_clock;
    const auto begin = Clock::now();
    const auto patience = std::chrono::nanoseconds(patience_.load(std::memory_order_relaxed));
    do {
        for (int spins = 0; spins < 32; ++spins) {
            if (read() != seen) return;
            pause();
        }
    } while (Clock::now() - begin < patience);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (read() == seen) value_.wait(seen, std::memory_order_acquire);
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    // more patience if a little more would have saved the sleep, less otherwise
    bool nearly = Clock::now() - begin < kWorthSpinning;
    int64_t next = nearly ? patience.count() * 2 : patience.count() * 3 / 4;
    patience_.store(std::clamp(next, kLeastPatience, kMostPatience), std::memory_order_relaxed);
}

void Teamwork::record(Time now, double seconds, double waited, size_t threads) {
    seconds_ += seconds;
    waited_ += waited;
    if (seconds_ < kTrial) return;
    // alone, the jobs take as long as the work of all threads: sharing is better if the caller waits less than the
    // others help
    bool wasted = waited_ * static_cast<double>(threads) > seconds_ * static_cast<double>(threads - 1);
    if (wasted) alone_until_ = now + pause_;
    pause_ = wasted ? std::min(pause_ * 2, kMostAlone) : std::max(pause_ / 2, kLeastAlone);
    seconds_ = waited_ = 0;
}

size_t Team::size() const { return pool_.size_; }

size_t Team::claim(size_t phase) {
    return pool_.counters_[phase % Pool::kPhases].next.fetch_add(1, std::memory_order_relaxed);
}

void Team::sync() {
    if (pool_.crew_ == 1) return;
    uint32_t seen = pool_.met_.read();
    if (pool_.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == pool_.crew_) {
        pool_.arrived_.store(0, std::memory_order_relaxed);
        pool_.met_.advance();
        return;
    }
    auto begin = std::chrono::steady_clock::now();
    pool_.met_.wait_while(seen);
    if (index_ == 0) pool_.waited_ += seconds_since(begin);
}

Pool& Pool::instance() {
    static std::once_flag once;
    std::call_once(once, [] {
        current = new Pool();  // never destroyed: threads end with the process
#if defined(__unix__) || defined(__APPLE__)
        // a forked child has none of its parent's threads and needs a new pool
        pthread_atfork(nullptr, nullptr, [] { current = new Pool(); });
#endif
    });
    return *current;
}

Pool::~Pool() { stop(); }

void Pool::resize(size_t threads) {
    std::lock_guard<std::mutex> lock(turn_);
    if (threads == size_) return;
    stop();
    size_ = threads;
    stopping_ = false;
    uint32_t seen = start_.read();
    try {
        for (size_t index = 1; index < threads; ++index) threads_.emplace_back(&Pool::work, this, index, seen);
    } catch (...) {
        stop();
        size_ = 1;
        throw;
    }
}

void Pool::stop() {
    stopping_ = true;
    start_.advance();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void Pool::run_job(Job job, const void* context, bool worth_sharing) {
    for (Counter& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
    job_ = job;
    context_ = context;
    auto begin = std::chrono::steady_clock::now();
    crew_ = worth_sharing && teamwork_.shares(begin) ? size_ : 1;
    waited_ = 0;
    if (crew_ > 1) start_.advance();
    Team team(*this, 0);
    job(context, team);
    team.sync();
    if (crew_ == 1) return;
    auto end = std::chrono::steady_clock::now();
    teamwork_.record(end, std::chrono::duration<double>(end - begin).count(), waited_, crew_);
}

void Pool::work(size_t index, uint32_t seen) {
    for (;; ++seen) {
        start_.wait_while(seen);
        if (stopping_) return;
        Team team(*this, index);
        job_(context_, team);
        team.sync();
    }
}

}  // namespace tpi
