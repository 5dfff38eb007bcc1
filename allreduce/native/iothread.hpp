// libzmq's I/O thread, kept on the CPU of the thread that sends and receives. What is queued for a socket passes through
// that thread, which sleeps between messages: it is woken within a few microseconds on a CPU that is awake, while an idle
// core, which the scheduler prefers, takes tens of them. Linux only; elsewhere nothing happens.
#pragma once

#ifdef __linux__
#include <sched.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <mutex>
#endif
#include <string>
#include <utility>
#include <vector>

namespace tpi {

#ifdef __linux__
class IoThread {
public:
    IoThread() { known_ = !sched_getaffinity(0, sizeof anywhere_, &anywhere_); }

    // Run where the calling thread runs.
    void follow() {
        const int cpu = sched_getcpu();
        if (cpu < 0 || cpu >= CPU_SETSIZE || !known_) return;
        const std::lock_guard lock(mutex_);
        if (std::exchange(kept_, cpu) == cpu && found_) return;  // what another group keeps there are not all of our threads
        cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET(cpu, &here);
        move(here);
        moved_ = true;
    }

    // Run anywhere, as a thread with much to do beside one that computes should.
    void release() {
        const std::lock_guard lock(mutex_);
        const bool kept = std::exchange(kept_, -1) >= 0;
        if (kept || moved_) move(anywhere_);  // another group that released first may not know all that this one moved
        moved_ = false;
    }

private:
    // That of each context of this process, by the name that libzmq gives it.
    static std::vector<int> find() {
        std::vector<int> found;
        std::error_code error;
        for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
            std::string name, id = task.path().filename();
            std::getline(std::ifstream(task.path() / "comm"), name);
            int thread = 0;
            std::from_chars(id.data(), id.data() + id.size(), thread);
            if (name.find("ZMQbg/IO") != std::string::npos) found.push_back(thread);
        }
        return found;
    }

    void move(const cpu_set_t& cpus) {
        if (!found_) threads_ = find();
        found_ = true;
        for (int thread : threads_) sched_setaffinity(thread, sizeof cpus, &cpus);  // it may have ended: then no matter
    }

    std::vector<int> threads_;
    cpu_set_t anywhere_;
    bool known_, found_ = false, moved_ = false;
    static inline std::mutex mutex_;  // two groups of this process would leave some threads here and some there
    static inline int kept_ = -1;     // the CPU that they are kept on, by whichever group of this process
};
#else
class IoThread {
public:
    void follow() {}
    void release() {}
};
#endif

}  // namespace tpi
