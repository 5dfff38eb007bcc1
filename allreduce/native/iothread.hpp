// Pins libzmq's I/O thread to the CPU of the thread that sends and receives. All messages pass through the I/O thread,
// which sleeps between them. On a CPU that is awake it wakes within a few microseconds; on an idle core, which the
// kernel's scheduler prefers, that takes tens of microseconds. Linux only; on other systems nothing happens.
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

    // Pins the I/O threads to the CPU of the calling thread.
    void follow() {
        const int cpu = sched_getcpu();
        if (cpu < 0 || cpu >= CPU_SETSIZE || !known_) return;
        const std::lock_guard lock(mutex_);
        // a group that has not found its threads yet must move them even if another group has pinned its own here
        if (std::exchange(kept_, cpu) == cpu && found_) return;
        cpu_set_t here;
        CPU_ZERO(&here);
        CPU_SET(cpu, &here);
        move(here);
        moved_ = true;
    }

    // Lets the I/O threads run on any CPU, for large transfers that would take CPU time from the computing thread.
    void release() {
        const std::lock_guard lock(mutex_);
        const bool kept = std::exchange(kept_, -1) >= 0;
        // `moved_`: another group that released first may not know all threads that this one moved
        if (kept || moved_) move(anywhere_);
        moved_ = false;
    }

private:
    // Returns the ids of the I/O threads of all contexts in this process, found by the name that libzmq gives them.
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
        // fails harmlessly if a thread has ended
        for (int thread : threads_) sched_setaffinity(thread, sizeof cpus, &cpus);
    }

    std::vector<int> threads_;
    cpu_set_t anywhere_;
    bool known_, found_ = false, moved_ = false;
    static inline std::mutex mutex_;  // so that two groups of a process do not pin the threads to different CPUs
    static inline int kept_ = -1;     // the CPU that a group of this process has pinned them to; -1: none
};
#else
class IoThread {
public:
    void follow() {}
    void release() {}
};
#endif

}  // namespace tpi
